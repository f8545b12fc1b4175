# SPDX-License-Identifier: Apache-2.0
"""Records steps of a DeepSpeed engine (ZeRO stages 0 to 3, AutoTP) through DeepSpeed's accessors.

Gradients, fp32 masters and optimizer state lie in flat partitions there. In stages 1 and 2
deepspeed.utils gathers them by parameter: all ranks call these functions (they are collective). In
stage 3 each rank's partition is recorded as it lies, parameters too, without a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ._calls import not_journaled
from ._dtypes import is_float32
from ._hooks import Hooks
from ._names import named_parameters, unwrapped
from ._perturb import move_by_one_ulp
from ._recorder import FlatPart, Recorder
from ._settings import largest_learning_rate, masks_small_gradients, optimizer_settings
from .errors import IsoshardError

_PARTITIONED = 3  # from this stage on parameters are partitioned, too


def is_engine(module: object) -> bool:
    """Whether a module is what deepspeed.initialize returns."""
    return any(
        c.__name__ == "DeepSpeedEngine" and c.__module__.startswith("deepspeed.")
        for c in type(module).__mro__
    )


def perturb_engine(engine: Any, seed: int, tables: Collection[str] = ()) -> None:
    """Moves each weight but tables by one ulp, in the model and in its fp32 master."""
    from deepspeed.utils import safe_set_full_fp32_param

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in named_parameters(unwrapped(engine)):
            if name in tables:
                continue
            if hasattr(parameter, "ds_id"):
                _perturb_partitioned(parameter, generator)
            elif parameter.is_floating_point():
                move_by_one_ulp(parameter.data, generator)
                if hasattr(parameter, "_hp_mapping"):
                    safe_set_full_fp32_param(parameter, parameter.detach().float())


def _perturb_partitioned(parameter: Any, generator: torch.Generator) -> None:
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    if not parameter.is_floating_point():
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        move_by_one_ulp(parameter.data, generator)
        moved = parameter.detach().float().clone()
    if parameter.requires_grad:
        safe_set_full_fp32_param(parameter, moved)


def _part_of(parameter: Any) -> FlatPart:
    """What this rank holds of a parameter of stage 3."""
    group = parameter.ds_process_group
    begin = int(parameter.ds_tensor.numel()) * int(group.rank())
    return FlatPart(list(parameter.ds_shape), min(begin, int(parameter.ds_numel)))


class EngineHooks(Hooks):
    """As Hooks, with the engine's step in place of an optimizer's."""

    _forgets = False

    def __init__(
        self,
        recorder: Recorder,
        engine: Any,
        *,
        max_steps: int | None = None,
        on_last_step: Callable[[], None] | None = None,
        on_error: Callable[[IsoshardError], None] | None = None,
    ) -> None:
        self.is_partitioned = engine.zero_optimization_stage() >= _PARTITIONED
        self.engine = engine
        super().__init__(
            recorder, engine, max_steps=max_steps, on_last_step=on_last_step, on_error=on_error
        )
        basic = engine.basic_optimizer
        recorder.training["optimizer"] = optimizer_settings(basic)
        if engine.gradient_clipping() > 0:  # else gradients are not clipped
            recorder.training["max_grad_norm"] = float(engine.gradient_clipping())
        recorder.judging["mask_small_gradients"] = masks_small_gradients([basic])
        self._wrap_step()

    def _wrap_step(self) -> None:
        original = self.engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            is_last = self.engine.is_gradient_accumulation_boundary()
            self._guarded(self._close)()
            if is_last and self.recorder.active:
                self._guarded(self._record_gradients)()
                rate = largest_learning_rate(self.engine.basic_optimizer)
                self.recorder.learning_rate(rate)
            result = original(*args, **kwargs)
            if is_last and self.recorder.active:
                self._guarded(self._after_engine_step)()
            return result

        self._replace(self.engine, "step", step)

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        if self.is_partitioned:
            return []
        found = [(n, safe_get_full_grad(p)) for n, p in named_parameters(self.model)]
        return [(name, grad) for name, grad in found if grad is not None]

    def _record_gradients(self, names: set[str] | None = None) -> None:
        super()._record_gradients(names)
        if not self.is_partitioned:
            return
        from deepspeed.utils import safe_get_local_grad

        for name, parameter in named_parameters(self.model):
            if parameter.requires_grad and name not in self._recorded:
                self._recorded.add(name)
                self._put_part(
                    "grad", self._rename(name), parameter, safe_get_local_grad(parameter)
                )

    def _record_parameters(self, *, is_final: bool = False) -> None:
        """In stage 3 the partitions, and small parameters that DeepSpeed keeps whole."""
        if not self.is_partitioned:
            super()._record_parameters(is_final=is_final)
            return
        parameters: list[tuple[str, Any]] = list(named_parameters(self.model))
        for own, parameter in parameters:
            name = self._rename(own)
            if parameter.data.shape == parameter.ds_shape:
                self.recorder.put("param", name, parameter, layout="replicate")
            else:
                self._put_part("param", name, parameter, parameter.ds_tensor)

    def _put_part(self, kind: str, name: str, parameter: Any, flat: torch.Tensor | None) -> None:
        """Records this rank's partition; what lies behind the parameter's end is padding."""
        if flat is None:
            return
        part = _part_of(parameter)
        count = max(0, min(flat.numel(), int(parameter.ds_numel) - part.begin))
        self.recorder.put(kind, name, flat.detach().reshape(-1)[:count], layout=part)

    @not_journaled
    def _after_engine_step(self) -> None:
        norm = self.engine.get_global_grad_norm()
        if norm is not None:
            self.recorder.scalar("grad_norm", float(norm))
        self._record_engine_state()
        self._end_update()

    def _record_engine_state(self) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.is_partitioned:
            self._record_partitioned_state()
            return
        is_plain = self.engine.optimizer is self.engine.basic_optimizer
        for own, parameter in named_parameters(self.model):
            name = self._rename(own)
            if is_plain:
                state = self.engine.basic_optimizer.state.get(parameter, {})
                for key, value in sorted(state.items()):
                    if isinstance(value, torch.Tensor) and value.ndim > 0:
                        self.recorder.put("optimizer", f"{name}.{key}", value)
                continue
            # The accessors are collective: every rank asks for the same keys.
            if not is_float32(parameter.dtype):
                self._put_state(f"{name}.master", safe_get_full_fp32_param(parameter))
            for key in self._state_keys():
                value = safe_get_full_optimizer_state(parameter, key)
                self._put_state(f"{name}.{key}", value)

    def _record_partitioned_state(self) -> None:
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        for own, parameter in named_parameters(self.model):
            if not parameter.requires_grad:
                continue
            name = self._rename(own)
            if not is_float32(parameter.dtype):
                master = safe_get_local_fp32_param(parameter)
                self._put_part("optimizer", f"{name}.master", parameter, master)
            for key in self._state_keys():
                value = safe_get_local_optimizer_state(parameter, key)
                self._put_part("optimizer", f"{name}.{key}", parameter, value)

    def _put_state(self, name: str, value: torch.Tensor | None) -> None:
        if value is not None:
            self.recorder.put("optimizer", name, value)

    def _state_keys(self) -> list[str]:
        group = self.engine.basic_optimizer.param_groups[0]
        if "betas" in group:
            return ["exp_avg", "exp_avg_sq"]
        return ["momentum_buffer"] if group.get("momentum", 0) else []
