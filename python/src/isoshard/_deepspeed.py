# SPDX-License-Identifier: Apache-2.0
"""Records steps of a DeepSpeed engine (ZeRO stages 0, 1 and 2) through DeepSpeed's own accessors.

Gradients, fp32 masters and optimizer state lie in flat partitions there; deepspeed.utils gathers
them by parameter. All ranks call these functions (they are collective).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._calls import not_journaled
from ._checks import canonical, unwrapped
from ._hooks import Hooks
from ._perturb import move_by_one_ulp
from ._recorder import Recorder
from ._settings import is_adam_like, optimizer_settings
from .errors import IsoshardError, RecordError

_LARGEST_STAGE = 2


def is_engine(module: object) -> bool:
    """Whether a module is what deepspeed.initialize returns."""
    return any(
        c.__name__ == "DeepSpeedEngine" and c.__module__.startswith("deepspeed.")
        for c in type(module).__mro__
    )


def perturb_engine(engine: Any, seed: int) -> None:
    """Moves each weight by one ulp, in the model and in its fp32 master."""
    from deepspeed.utils import safe_set_full_fp32_param

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in unwrapped(engine).parameters():
            if parameter.is_floating_point():
                move_by_one_ulp(parameter.data, generator)
                if hasattr(parameter, "_hp_mapping"):
                    safe_set_full_fp32_param(parameter, parameter.detach().float())


class EngineHooks(Hooks):
    """As Hooks, with the engine's step in place of an optimizer's."""

    def __init__(
        self,
        recorder: Recorder,
        engine: Any,
        *,
        max_steps: int | None = None,
        on_last_step: Callable[[], None] | None = None,
        on_error: Callable[[IsoshardError], None] | None = None,
    ) -> None:
        stage = engine.zero_optimization_stage()
        if stage > _LARGEST_STAGE:
            raise RecordError(
                f"The ZeRO stage must be 0, 1 or 2 to be recorded, got {stage}. Judge the script "
                "at stage 2, or with FSDP2."
            )
        self.engine = engine
        super().__init__(
            recorder, engine, max_steps=max_steps, on_last_step=on_last_step, on_error=on_error
        )
        basic = engine.basic_optimizer
        recorder.training["optimizer"] = optimizer_settings(basic)
        recorder.training["max_grad_norm"] = float(engine.gradient_clipping())
        recorder.judging["mask_small_gradients"] = is_adam_like([basic])
        self._wrap_step()

    def _wrap_step(self) -> None:
        original = self.engine.step

        def step(*args: Any, **kwargs: Any) -> Any:
            is_last = self.engine.is_gradient_accumulation_boundary()
            if is_last and self.recorder.active:
                self._record_gradients()
                rate = float(self.engine.basic_optimizer.param_groups[0]["lr"])
                self.recorder.scalar("learning_rate", rate)
            result = original(*args, **kwargs)
            if is_last and self.recorder.active:
                self._after_engine_step()
            return result

        self.engine.step = step
        self._undo.append(lambda: setattr(self.engine, "step", original))

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        found = [(n, safe_get_full_grad(p)) for n, p in self.model.named_parameters()]
        return [(name, grad) for name, grad in found if grad is not None]

    @not_journaled
    def _after_engine_step(self) -> None:
        norm = self.engine.get_global_grad_norm()
        if norm is not None:
            self.recorder.scalar("grad_norm", float(norm))
        self._record_engine_state()
        self.end_step()

    def _record_engine_state(self) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        is_plain = self.engine.optimizer is self.engine.basic_optimizer
        for raw, parameter in self.model.named_parameters():
            name = self._rename(canonical(raw))
            if is_plain:
                state = self.engine.basic_optimizer.state.get(parameter, {})
                for key, value in sorted(state.items()):
                    if isinstance(value, torch.Tensor) and value.ndim > 0:
                        self.recorder.put("optimizer", f"{name}.{key}", value)
                continue
            # The accessors are collective: every rank asks for the same keys.
            if parameter.dtype != torch.float32:
                self._put_state(f"{name}.master", safe_get_full_fp32_param(parameter))
            for key in self._state_keys():
                value = safe_get_full_optimizer_state(parameter, key)
                self._put_state(f"{name}.{key}", value)

    def _put_state(self, name: str, value: torch.Tensor | None) -> None:
        if value is not None:
            self.recorder.put("optimizer", name, value)

    def _state_keys(self) -> list[str]:
        group = self.engine.basic_optimizer.param_groups[0]
        if "betas" in group:
            return ["exp_avg", "exp_avg_sq"]
        return ["momentum_buffer"] if group.get("momentum", 0) else []
