# SPDX-License-Identifier: Apache-2.0
"""A plain training step for `isoshard.check`: the same code in one process and on many ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _float64
from ._generic import move_generically
from ._level1 import record
from ._mesh import DATA_AXES, Mesh
from ._options import Options
from ._pipeline import Stages, clip_norm_of_stages, is_schedule
from ._program import respond
from ._repeat import require_repeat
from .errors import RunError, UsageError

Build = Callable[[], torch.nn.Module]
#: Gets the model and a DeviceMesh; returns the wrapped model, a schedule of
#: torch.distributed.pipelining, or None if it changed the model in place; or a pair of model and
#: optimizer.
Parallelize = Callable[[torch.nn.Module, Any], Any]
MakeOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
#: Arguments of the model: a tensor, a tuple of tensors, or tensors by name. Dim 0 is the samples.
Batch = torch.Tensor | tuple[torch.Tensor, ...] | Mapping[str, torch.Tensor]
#: Gets the model's output and the (local) batch; returns the mean loss over its samples.
Loss = Callable[[Any, Any], torch.Tensor]
#: Gets the model, the optimizer and this rank's micro-batches; makes one optimizer step.
Step = Callable[[Any, Any, list[Any]], None]

NUM_PERTURBED = 3


@dataclass
class Case:
    """What `isoshard.check` was given."""

    build: Build
    parallelize: Parallelize
    mesh: dict[str, int]
    batch: Batch
    optimizer: MakeOptimizer
    loss: Loss | None = None
    micro_batches: int = 1
    steps: int = 1
    max_grad_norm: float | None = None
    seed: int = 0
    name: str = "check"
    device: str = "cpu"
    parallel_reference: bool = False
    step: Step | None = None
    options: dict[str, Any] = field(default_factory=dict)
    generic_weights: bool = True

    def validate(self) -> None:
        """Raises UsageError if the batch cannot be split, or an option has no meaning."""
        Options(**{k: v for k, v in self.options.items() if k in Options.__dataclass_fields__})
        mesh = Mesh(self.mesh)
        if self.micro_batches < 1 or self.steps < 1:
            raise UsageError(
                f"micro_batches and steps must be 1 or more, got {self.micro_batches} and "
                f"{self.steps}."
            )
        samples = {t.shape[0] for t in _tensors(self.batch)}
        parts = mesh.data_degree * self.micro_batches
        if len(samples) != 1:
            raise UsageError(
                "All tensors of the batch must have as many samples in dim 0, got "
                f"{sorted(samples)}."
            )
        if next(iter(samples)) % parts != 0:
            raise UsageError(
                f"The samples of the batch must be a multiple of {parts} (data-parallel ranks x "
                f"micro-batches), got {next(iter(samples))}."
            )


def _tensors(batch: Batch) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    values = list(batch.values()) if isinstance(batch, Mapping) else list(batch)
    if not values or not all(isinstance(v, torch.Tensor) and v.ndim > 0 for v in values):
        raise UsageError("A batch must be a tensor, a tuple of tensors, or tensors by name.")
    return values


def _part(batch: Batch, parts: int, index: int) -> Any:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(parts)[index]

    if isinstance(batch, torch.Tensor):
        return cut(batch)
    if isinstance(batch, Mapping):
        return {name: cut(tensor) for name, tensor in batch.items()}
    return tuple(cut(tensor) for tensor in batch)


def _call(model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return model(batch)
    return model(**batch) if isinstance(batch, Mapping) else model(*batch)


def _loss_of(case: Case, output: Any, batch: Any) -> torch.Tensor:
    if case.loss is not None:
        return case.loss(output, batch)
    loss = getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(
            "The model must return its loss (a number, or an output with .loss), or loss= must be "
            f"given, got {type(output).__name__}."
        )
    return loss


def _train(
    case: Case,
    model: Any,
    directory: str,
    share: tuple[int, int],
    step: Step | None = None,
    **extra: Any,
) -> None:
    if is_schedule(model):
        _train_pipeline(case, model, directory, share, **extra)
        return
    if isinstance(model, tuple):
        model, optimizer = model
    else:
        optimizer = case.optimizer(model.parameters())
    local = _part(case.batch, *share)
    parts = [_part(local, case.micro_batches, micro) for micro in range(case.micro_batches)]
    with record(directory, model, optimizer, case=case.name, **{**case.options, **extra}):
        for _ in range(case.steps):
            if step is not None:
                step(model, optimizer, parts)
            else:
                _plain_step(case, model, optimizer, parts)


def _plain_step(case: Case, model: Any, optimizer: Any, parts: list[Any]) -> None:
    for part in parts:
        loss = _loss_of(case, _call(model, part), part)
        torch.autograd.backward(loss / case.micro_batches)
    if case.max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


def _train_pipeline(
    case: Case, schedule: Any, directory: str, share: tuple[int, int], **extra: Any
) -> None:
    """The schedule makes micro-batches and losses: its loss_fn gets the output and the batch."""
    local = _part(case.batch, *share)
    if not isinstance(local, torch.Tensor):
        raise UsageError(
            "The batch must be one tensor where parallelize returns a pipeline's schedule, which "
            f"takes it as input and as target, got {type(local).__name__}."
        )
    stages = Stages(schedule)
    optimizer = case.optimizer(stages.parameters())
    first, last = stages.stages[0].is_first, stages.stages[-1].is_last
    with record(directory, schedule, optimizer, case=case.name, **{**case.options, **extra}):
        for _ in range(case.steps):
            schedule.step(*((local,) if first else ()), target=local if last else None)
            if case.max_grad_norm is not None:
                clip_norm_of_stages(stages, case.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()


def _build(case: Case) -> torch.nn.Module:
    _float64.begin_program()
    torch.manual_seed(case.seed)
    model = case.build().to(case.device)
    if case.generic_weights:
        move_generically(model)
    return model


def run_reference(case: Case, directory: str, device_mesh: Any) -> None:
    """One process, a second time, and with weights moved by one ulp; with responses.

    `device_mesh` has one rank. It is None if the reference is the model as it is built.
    """
    from pathlib import Path

    def build() -> Any:
        model = _build(case)
        wrapped = None if device_mesh is None else case.parallelize(model, device_mesh)
        return model if wrapped is None else wrapped

    step = None if device_mesh is None else case.step
    _train(case, build(), directory, (1, 0), step, subject="reference")
    if not _float64.is_on():  # there it repeats if it does so natively
        _train(case, build(), f"{directory}.repeat", (1, 0), step, subject="reference")
        try:
            require_repeat(Path(directory), Path(f"{directory}.repeat"))
        except RunError:
            return  # whoever finds the repeat left says so; perturbed runs would be refused
        shutil.rmtree(f"{directory}.repeat")
    perturbed = []
    for i in range(NUM_PERTURBED):
        path = f"{directory}.perturbed{i}"
        given = {"subject": "perturbed", "perturb": 1000 + i, "reference": directory}
        _train(case, build(), path, (1, 0), step, **given)
        perturbed.append(Path(path))
    respond(Path(directory), perturbed)


def run_parallel(case: Case, directory: str, rank: int, device_mesh: Any) -> None:
    """What one rank does of the parallel run."""
    mesh = Mesh(case.mesh)
    model = _build(case)
    wrapped = case.parallelize(model, device_mesh)
    index = 0
    for axis, coordinate in mesh.coordinates(rank).items():
        if axis in DATA_AXES:
            index = index * mesh.axes[axis] + coordinate
    share = (mesh.data_degree, index)
    chosen = wrapped if wrapped is not None else model
    _train(case, chosen, directory, share, case.step, mesh=mesh, subject="parallelize")
