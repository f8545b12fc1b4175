# SPDX-License-Identifier: Apache-2.0
"""Feeds the single process the samples that the ranks took (`isoshard judge --replay`).

A script may let each process draw its own samples. Then the single process trains on other samples
than the ranks, and nothing can be compared. With --replay the ranks run first. The single process
runs the same script, and each of its forward passes gets the inputs of one or several recorded
forward passes instead of its own. The tensors that the loss takes besides the model's output, such
as labels, are replaced in the same way.

Whether the samples themselves are right is judged apart (_sample_sets), because the two runs take
the same samples by construction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from . import _bundle
from ._calls import is_own
from ._mesh import Mesh
from ._sample_sets import REPLAYED_AXES, heads_of, inputs_of, mesh_of_bundle, micros_of
from .errors import Divergence, RecordError, UsageError

#: A recorded forward pass: the rank that made it, and its micro-batch there.
Source = tuple[int, int]
#: The data ids of tensors that the loss takes besides the model's output: target, target1, ...
TARGET = "target"


@dataclass(frozen=True)
class Plan:
    """The recorded forward passes that each forward pass of the single process gets.

    `passes[step][i]` belongs to the i-th forward pass of the step whose gradients the step reads.
    Its sources are joined along dim 0 in their order. `micros[step][i]` is the micro-batch of that
    pass in a single process that draws its own samples.
    """

    run: str
    passes: dict[int, list[list[Source]]]
    micros: dict[int, list[int]]

    def write(self, file: Path) -> None:
        """Writes the plan for the single processes."""
        file.write_text(json.dumps({"run": self.run, "passes": self.passes, "micros": self.micros}))

    @staticmethod
    def read(file: Path) -> Plan:
        """Reads what `write` wrote."""
        content = json.loads(file.read_text())
        passes = {
            int(step): [[(int(r), int(m)) for r, m in sources] for sources in of_step]
            for step, of_step in content["passes"].items()
        }
        micros = {int(step): list(of_step) for step, of_step in content["micros"].items()}
        return Plan(content["run"], passes, micros)


def require_axes(mesh: Mesh) -> None:
    """Raises for a mesh over which inputs cannot be joined along dim 0."""
    others = [a for a, degree in mesh.axes.items() if degree > 1 and a not in REPLAYED_AXES]
    if others:
        raise UsageError(
            f"--replay must join the ranks' samples along dim 0, got a mesh with {others[0]}, "
            "which cuts or splits up what a rank reads. Let all processes draw the same samples, "
            "and judge without --replay."
        )


def make_plan(own: Path, run: Path) -> Plan:
    """The plan from a run and from a single process that drew its own samples.

    Errors: Divergence if the ranks make another number of forward passes than the single process
    and than can be spread over its passes.
    """
    mesh = mesh_of_bundle(run)
    heads = heads_of(mesh)
    passes: dict[int, list[list[Source]]] = {}
    micros: dict[int, list[int]] = {}
    known = _bundle.read_manifest(own)["steps"]
    for step in (s for s in _bundle.read_manifest(run)["steps"] if s in known):
        with _bundle.checked(run):
            of_single = micros_of(own, step, 0)
            of_ranks = {rank: micros_of(run, step, rank) for rank in heads}
        numbers = {len(m) for m in of_ranks.values()}
        if numbers == {len(of_single)}:
            passes[step] = [
                [(rank, of_rank[i]) for rank, of_rank in of_ranks.items()]
                for i in range(len(of_single))
            ]
        elif sum(len(m) for m in of_ranks.values()) == len(of_single):
            passes[step] = [[(rank, m)] for rank, of_rank in of_ranks.items() for m in of_rank]
        else:
            said = ", ".join(f"{len(m)} on rank {rank}" for rank, m in of_ranks.items())
            raise Divergence(
                f"The ranks must make as many forward passes in a step as the single process, each "
                f"or all together, got {said} and {len(of_single)} in the single process "
                f"(step {step}). Look at the number of micro-batches."
            )
        micros[step] = of_single
    if not passes:
        raise RecordError(
            "--replay must find inputs of the model in both runs, got none. Judge without it."
        )
    return Plan(str(run.resolve()), passes, micros)


class Replay:
    """Records what the loss takes, and gives a single process the inputs of recorded ranks.

    Without a plan, as on the ranks themselves, all tensors keep their values.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.plan = Plan("", {}, {}) if file is None else Plan.read(file)
        self.loss_inputs = LossInputs()
        self._step = -1
        self._recorded: dict[int, dict[int, dict[str, torch.Tensor]]] = {}  # by rank
        self._replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replace(self, step: int, micro: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gives tensors of a forward pass the recorded values, in place, until `restore`."""
        sources = self._sources(step, micro)
        if not sources:
            return
        for name, tensor in tensors:
            parts = [self._recorded[rank].get(m, {}).get(name) for rank, m in sources]
            found = [part for part in parts if part is not None]
            if len(found) < len(parts):
                continue
            value = _joined(name, found, tensor.detach().to("cpu"))
            if value is not None:
                self._replaced.append((tensor, tensor.data))
                tensor.data = value.to(device=tensor.device, dtype=tensor.dtype)

    def restore(self) -> None:
        """Gives tensors their own values back."""
        while self._replaced:
            tensor, own = self._replaced.pop()
            tensor.data = own

    def _sources(self, step: int, micro: int) -> list[Source]:
        micros = self.plan.micros.get(step, [])
        if micro not in micros:
            return []  # no step reads its gradients
        if step != self._step:
            self._step = step
            ranks = {rank for sources in self.plan.passes[step] for rank, _ in sources}
            run = Path(self.plan.run)
            self._recorded = {rank: inputs_of(run, step, rank) for rank in ranks}
        return self.plan.passes[step][micros.index(micro)]


def _joined(name: str, parts: list[torch.Tensor], own: torch.Tensor) -> torch.Tensor | None:
    """The ranks' tensors as one; None where the single process keeps its own.

    It keeps what is the same in all processes, such as positions and masks without samples.
    """
    if all(_are_equal(part, own) for part in parts):
        return None
    if len(parts) == 1:
        return parts[0]
    if any(part.ndim == 0 or part.shape[1:] != parts[0].shape[1:] for part in parts):
        shapes = " and ".join(str(list(part.shape)) for part in parts[:2])
        raise RecordError(
            f"The ranks' samples must have one shape to be replayed as one batch, got {shapes} "
            f"({name}). Pad samples to a fixed length."
        )
    return torch.cat(parts)


def _are_equal(part: torch.Tensor, own: torch.Tensor) -> bool:
    return part.shape == own.shape and torch.equal(part.to(own.dtype), own)


class LossInputs(TorchFunctionMode):
    """Sees the tensors that a script combines with the model's output, such as labels.

    It looks from `begin` at the end of a forward pass to `end` at the begin of backward. A tensor
    counts if the script made it before, if nothing is differentiated by it, and if its rows are a
    multiple of the number of samples. The mode is entered before the script begins, so that it is
    below all modes of the script.
    """

    def __init__(self) -> None:
        super().__init__()
        self._samples = 0  # none: it does not look
        self._known: Any = WeakIdKeyDictionary()
        self._see: Callable[[torch.Tensor], None] = lambda tensor: None

    def begin(
        self, samples: int, known: Iterable[torch.Tensor], see: Callable[[torch.Tensor], None]
    ) -> None:
        """Gives `see` each such tensor once, before it is used."""
        self._samples, self._see = samples, see
        self._known = WeakIdKeyDictionary(dict.fromkeys(known))

    def end(self) -> None:
        """Looks no more."""
        self._samples = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling() or not self._samples or is_own():
            return func(*args, **(kwargs or {}))
        for tensor in self._new((args, kwargs)):
            if self._counts(tensor):
                self._see(tensor)
        result = func(*args, **(kwargs or {}))
        self._new(result)
        return result

    def _new(self, value: Any) -> list[torch.Tensor]:
        """The tensors that were not met before; they are known now."""
        leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
        found = [tensor for tensor in leaves if tensor not in self._known]
        self._known.update(dict.fromkeys(found))
        return found

    def _counts(self, tensor: torch.Tensor) -> bool:
        is_plain = type(tensor) is torch.Tensor and not tensor.requires_grad and tensor.ndim > 0
        return is_plain and len(tensor) > 0 and len(tensor) % self._samples == 0
