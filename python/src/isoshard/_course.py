# SPDX-License-Identifier: Apache-2.0
"""Follows the steps that a script makes before it is recorded, or before it is stopped.

A rank leaves what it has seen in a file for the driver: digests of the weights that each step began
with, and of the inputs that it read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ._checks import draws_masks, outside_parameters, random_state
from ._dtensor import local_of
from ._inputs import as_input, tensors_of
from ._names import named_parameters, unwrapped
from ._safetensors import bytes_of
from ._settings import largest_learning_rate

#: What an input of a model is: its name, and a digest of its bytes.
Input = tuple[str, str]


@dataclass
class Steps:
    """What a rank has seen of the steps, from the first one on; the last one may be incomplete."""

    weights: list[dict[str, str]] = field(default_factory=list)  # digests of those that are trained
    inputs: list[list[Input]] = field(default_factory=list)
    random: list[str] = field(default_factory=list)  # the state of random numbers, as a step begins
    rates: list[float] = field(default_factory=list)  # the learning rate of each step that was made
    has_dropout: bool = False
    is_stopped: bool = False

    @staticmethod
    def read(file: Path) -> Steps:
        """As a rank has left it."""
        content = json.loads(file.read_text())
        content["inputs"] = [[(name, d) for name, d in step] for step in content["inputs"]]
        return Steps(**content)


def course_file(logs: Path, rank: int) -> Path:
    """Where a rank leaves its steps."""
    return logs / f"rank{rank:05d}.course"


class Course:
    """Counts a script's optimizer steps up to the one at which recording begins, or the end."""

    def __init__(self, begin_at: int, end_at: int | None) -> None:
        """`begin_at`: the first step that is recorded; `end_at`: the one at which the process ends,
        with nothing recorded."""
        self.begin_at, self.end_at = begin_at, end_at
        self.steps = Steps()
        self._made: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._root: weakref.ref[torch.nn.Module] | None = None
        self._calls = 0  # of the model
        self._most = 0  # steps of any optimizer, also after it is gone
        self._counted: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )  # the calls before the last step that was counted

    def count(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A hook behind an optimizer's step. One without a forward pass before it does not count.

        torch.distributed.checkpoint makes such a step to have an optimizer's states.
        """
        if self._calls == self._counted.get(optimizer, 0):
            return
        self._counted[optimizer] = self._calls
        step = self._made[optimizer] = self._made.get(optimizer, 0) + 1
        self._most = max(self._most, step)
        rate = largest_learning_rate(optimizer)
        if rate is not None and step > len(self.steps.rates):
            self.steps.rates.append(rate)

    def has_come(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> bool:
        """Whether this call begins the step that counts. The first module of all is the model."""
        if self._root is None:
            self._root = weakref.ref(module)
        if self._root() is not module:
            return False
        self._calls += 1
        made = self.made(optimizers)
        self._note(made, module, optimizers, inputs)
        return made >= (self.begin_at if self.end_at is None else self.end_at)

    def made(self, optimizers: Iterable[torch.optim.Optimizer]) -> int:
        """The steps that all of them have made."""
        return min((self._made.get(optimizer, 0) for optimizer in optimizers), default=0)

    def _note(
        self,
        step: int,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> None:
        steps, model = self.steps, unwrapped(module)
        steps.has_dropout = draws_masks(model)
        if step >= len(steps.weights):
            held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
            named = [*named_parameters(model), *outside_parameters(model, optimizers).items()]
            own = {name: _digest(p) for name, p in named if id(p) in held}
            while step >= len(steps.weights):
                steps.weights.append(own)
                steps.inputs.append([])
                steps.random.append(_digest_of(random_state()))
        args, kwargs = inputs
        for whole, argument in [*enumerate(args), *kwargs.items()]:
            for name, value in tensors_of(str(whole), argument):
                if value.grad_fn is None and value.ndim > 0:
                    steps.inputs[step].append((name, _digest(as_input(value))))

    def leave(self, logs: Path, rank: int) -> None:
        """Writes what was seen, for the driver."""
        logs.mkdir(parents=True, exist_ok=True)
        course_file(logs, rank).write_text(json.dumps(asdict(self.steps)))

    def stop(self, logs: Path, rank: int) -> None:
        """Ends the process where it stands."""
        self.steps.is_stopped = True
        self.leave(logs, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def why_not(self, rank: int) -> str:
        """What is said if the script ended before the step that counts."""
        if self.begin_at == 0 and self.end_at is None:
            return (
                f"Rank {rank} must go on to train when it is started again, got a script that "
                "ended without a step. Let it train for longer than up to the stop (--resume-at)."
            )
        at = self.begin_at if self.end_at is None else self.end_at
        return (
            f"Rank {rank} must begin step {at}, counted from 0 (--resume-at {at}), got a script "
            f"that ended after {self._most} optimizer steps. Let it train for longer, or "
            "give --resume-at a smaller number."
        )


def _digest(tensor: torch.Tensor) -> str:
    return _digest_of([local_of(tensor.detach())])


def _digest_of(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(bytes_of(tensor.cpu().contiguous()))
    return digest.hexdigest()
