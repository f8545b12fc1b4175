# SPDX-License-Identifier: Apache-2.0
"""Records steps of a schedule of torch.distributed.pipelining: the stages that a rank holds.

A rank holds the layers of its stages alone. Their tensors are recorded with the placement
`only_at` on the axis pp, under the names that they have in the stages' modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._hooks import Hooks
from ._names import compiled_root, unwrapped
from ._recorder import Recorder
from .errors import IsoshardError, RecordError

_SCHEDULES = "torch.distributed.pipelining.schedules"


def is_schedule(value: object) -> bool:
    """Whether this is a schedule of torch.distributed.pipelining (asked without importing it)."""
    module = sys.modules.get(_SCHEDULES)
    return module is not None and isinstance(value, module._PipelineSchedule)


def calling_schedule() -> Any | None:
    """The schedule that calls this function from further up, if one does."""
    if _SCHEDULES not in sys.modules:
        return None
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if is_schedule(owner):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def stages_of(schedule: Any) -> list[Any]:
    """The stages that this rank holds, in the order of the model."""
    single = getattr(schedule, "_stage", None)
    stages = [single] if single is not None else list(schedule._stages)
    return sorted(stages, key=lambda stage: int(stage.stage_index))


class Stages(torch.nn.Module):
    """What a rank holds of a model in a pipeline, seen as one model: names are the stages' own."""

    def __init__(self, schedule: Any) -> None:
        super().__init__()
        # In a tuple, so that torch.nn.Module does not take them for children with names.
        self.parts = (schedule, stages_of(schedule))
        seen: dict[str, int] = {}
        for stage in self.stages:
            for name, _ in unwrapped(stage.submod).named_parameters():
                if name in seen:
                    raise RecordError(
                        f"The stages of a rank must have parameters with names of their own, got "
                        f"{name} in stages {seen[name]} and {stage.stage_index}. Name layers as in "
                        "the whole model: torch.nn.ModuleDict with their numbers as keys."
                    )
                seen[name] = stage.stage_index

    @property
    def schedule(self) -> Any:
        """The schedule."""
        return self.parts[0]

    @property
    def stages(self) -> list[Any]:
        """The stages, in the order of the model."""
        return self.parts[1]

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Those of all stages."""
        for stage in self.stages:
            yield from unwrapped(stage.submod).named_parameters(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Those of all stages; the stages themselves have no name."""
        yield "", self
        for stage in self.stages:
            compiled = compiled_root(stage.submod)
            if compiled is not None:
                yield "", compiled
            yield from unwrapped(stage.submod).named_modules(*args, **kwargs)


class PipelineHooks(Hooks):
    """As Hooks, for the stages of a schedule."""

    _forgets = False

    def __init__(
        self,
        recorder: Recorder,
        model: Stages,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        max_steps: int | None = None,
        on_last_step: Callable[[], None] | None = None,
        on_error: Callable[[IsoshardError], None] | None = None,
    ) -> None:
        self.schedule, self.stages = model.schedule, model.stages
        self._micro_of: dict[int, int] = {}
        recorder.stage = _coordinate(recorder, self.stages[0])
        # Gradients are divided by the number of micro-batches after the last one.
        factor = self.schedule._n_microbatches if self.schedule.scale_grads else 1
        self._num_losses = factor
        super().__init__(
            recorder,
            model,
            optimizers,
            max_steps=max_steps,
            on_last_step=on_last_step,
            on_error=on_error,
        )
        self._grad_factor /= factor
        # Zero-bubble schedules go through a stage for its input first, for its weights later.
        self._is_backward_split = True

    def _attach_root(self) -> None:
        for stage in self.stages:
            before = self._guarded(self._before_stage(stage))
            after = self._guarded(self._after_batch)
            self._keep(stage.submod.register_forward_pre_hook(before, with_kwargs=True))
            self._keep(stage.submod.register_forward_hook(after))
        original = self.schedule._loss_fn
        if original is None:
            raise RecordError(
                "A schedule must have a loss_fn to be recorded, got none: it trains nothing. Give "
                "it one."
            )

        def loss_fn(*args: Any, **kwargs: Any) -> Any:
            loss = original(*args, **kwargs)
            if self._recording() and self.schedule._has_backward:
                self._losses.append(loss.detach().clone() / self._num_losses)
            return loss

        self._replace(self.schedule, "_loss_fn", loss_fn)

    def _before_stage(self, stage: Any) -> Callable[[torch.nn.Module, Any, Any], None]:
        """Counts the micro-batches of each stage; inputs of later stages are activations."""
        index = int(stage.stage_index)

        def before(
            module: torch.nn.Module, args: Any, kwargs: dict[str, Any] | None = None
        ) -> None:
            if kwargs is None or not self._recording():
                return
            self._close()
            self._micro = self._micro_of.get(index, -1)
            self._micro_of[index] = self._micro + 1
            is_first = bool(stage.is_first)
            self._on_batch(module, args if is_first else (), kwargs if is_first else {})

        return before

    def _patch_backward(self) -> None:
        """Losses are seen where the schedule computes them."""

    def _expect_backward(self, output: Any) -> None:
        """Each micro-batch of a schedule has its backward pass."""

    def _begin_anew(self) -> None:
        """Counts the micro-batches of each stage anew, too."""
        self._micro_of = {}
        super()._begin_anew()


def _coordinate(recorder: Recorder, stage: Any) -> int | None:
    """The rank's coordinate on the axis pp; None in a single process."""
    if recorder.world_size == 1:
        return None
    mesh = recorder.mesh
    group = sorted(dist.get_process_group_ranks(stage.group or dist.group.WORLD))
    line = mesh.line(recorder.rank, "pp") if "pp" in mesh.axes else [recorder.rank]
    if group != line:
        raise RecordError(
            f"The axis pp of the mesh must hold the ranks of a pipeline, got {mesh}, where rank "
            f"{recorder.rank} has the pipeline's ranks {group}. Give the mesh from the slowest "
            "axis to the fastest, such as pp=2,dp=2 (--mesh, mesh=)."
        )
    return mesh.coordinates(recorder.rank)["pp"] if len(group) > 1 else None


def clip_norm_of_stages(model: Stages, max_norm: float) -> None:
    """Clips gradients to a norm over all stages; every rank of the pipeline calls it."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    stage = model.stages[0]
    if stage.group_size > 1:
        square = norm.square()
        dist.all_reduce(square, group=stage.group)
        norm = square.sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
