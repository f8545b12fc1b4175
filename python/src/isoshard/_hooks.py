# SPDX-License-Identifier: Apache-2.0
"""Hooks that record a training step while the script runs unchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._checks import (
    canonical,
    compiled_names,
    compiled_root,
    is_compiled,
    refuse_dropout,
    unwrapped,
)
from ._dtensor import is_dtensor, local_of
from ._mesh import DATA_AXES
from ._recorder import Recorder, sum_of_losses
from ._settings import is_adam_like, training_settings
from .errors import RecordError

#: Recorded at their input, too, under this name: what enters an output projection.
_INPUTS = {"o_proj": "core", "down_proj": "act"}
_SKIPPED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Dropout)
_SKIPPED_ENDS = ("rotary_emb", "act_fn")


class Hooks:
    """Attaches a recorder to a model and its optimizers; `detach` takes all hooks off again."""

    def __init__(
        self,
        recorder: Recorder,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        max_steps: int | None = None,
        on_last_step: Callable[[], None] | None = None,
    ) -> None:
        self.recorder = recorder
        self.model = unwrapped(model)
        self.compiled_root = compiled_root(model)
        refuse_dropout(self.model)
        self.optimizers = list(optimizers)
        self.max_steps, self.on_last_step = max_steps, on_last_step
        self._undo: list[Callable[[], None]] = []
        self._losses: list[torch.Tensor] = []
        self._micro = -1
        self._calls: dict[tuple[str, str], int] = {}  # of this forward pass
        self._has_gradients = False
        self._stepped: set[int] = set()
        self._names = {id(p): canonical(n) for n, p in self.model.named_parameters()}
        self._check_optimizers()
        self._attach()
        recorder.training.update(training_settings(self.model, self.optimizers))
        self._set_judging()
        self._record_parameters()

    # -- attaching ---------------------------------------------------------------------------

    def _check_optimizers(self) -> None:
        for optimizer in self.optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            known = [p for p in held if id(p) in self._names]
            if not known:
                raise RecordError(
                    f"The optimizer must step parameters of the recorded model "
                    f"({type(self.model).__name__}), got {type(optimizer).__name__} with "
                    f"{len(held)} other tensors. Build it after the model is wrapped, or record "
                    "with isoshard.record(directory, model, optimizer)."
                )
            if len(known) < len(held):
                self.recorder.not_recorded["param/outside_of_the_model"] = (
                    f"{len(held) - len(known)} parameters of the optimizer are in no module of "
                    f"{type(self.model).__name__}"
                )

    def _attach(self) -> None:
        root = self.model if self.compiled_root is None else self.compiled_root
        if is_compiled(root):
            self._wrap_compiled(root, self._on_batch)
        else:
            self._keep(root.register_forward_pre_hook(self._on_batch, with_kwargs=True))
        if self.recorder.options.activations:
            compiled = compiled_names(self.model) if self.compiled_root is None else [""]
            self._attach_activations(compiled)
        for optimizer in self.optimizers:
            self._keep(optimizer.register_step_pre_hook(self._before_step))
            self._keep(optimizer.register_step_post_hook(self._after_step))
        self._patch_clipping()
        self._patch_backward()

    def _wrap_compiled(
        self, module: torch.nn.Module, before: Callable[[torch.nn.Module, Any, Any], None]
    ) -> None:
        """Calls `before` at the border of a module whose hooks are compiled."""
        compiled: Any = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            before(module, args, kwargs)
            return compiled(*args, **kwargs)

        module._compiled_call_impl = call
        self._undo.append(lambda: setattr(module, "_compiled_call_impl", compiled))

    def _attach_activations(self, compiled: Sequence[str]) -> None:
        for name in compiled:
            inside = f"{name}.*" if name else "*"
            for kind in ("activation", "activation_grad"):
                self.recorder.not_recorded[f"{kind}/{inside}"] = (
                    f"{name or 'the model'} is compiled: no hook inside it is called"
                )
        seen: set[str] = set()
        for raw, module in self.model.named_modules():
            name = canonical(raw)
            last = name.rpartition(".")[2]
            if not name or name in seen or isinstance(module, _SKIPPED) or last in _SKIPPED_ENDS:
                continue
            if any(c == "" or name.startswith(c + ".") for c in compiled) or is_compiled(module):
                continue
            seen.add(name)
            self._keep(module.register_forward_hook(self._output_hook(self._rename(name))))
            if last in _INPUTS:
                point = ".".join([*name.split(".")[:-1], _INPUTS[last]])
                self._keep(module.register_forward_pre_hook(self._input_hook(self._rename(point))))

    def _keep(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _rename(self, name: str) -> str:
        return self.recorder.options.name(name)

    def _set_judging(self) -> None:
        self.recorder.judging.update(
            {
                "mask_small_gradients": is_adam_like(self.optimizers),
                "activation_grad_scale": "dp",
                "partial": ["scalar/loss", "activation/*", "activation_grad/*"],
            }
        )
        if self.recorder.mesh.data_degree == 1:
            self.recorder.not_recorded["scalar/loss_per_dp_rank"] = "one process has one loss"

    def detach(self) -> None:
        """Takes all hooks off."""
        while self._undo:
            self._undo.pop()()

    # -- forward and backward ----------------------------------------------------------------

    def _recording(self) -> bool:
        return (
            self.recorder.active
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1  # else recomputed for backward
        )

    def _on_batch(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._recording():
            return
        self._micro += 1
        self._calls = {}
        named = [(f"input{i}" if i else "input_ids", v) for i, v in enumerate(args)]
        named += sorted(kwargs.items(), key=lambda item: item[0] not in ("input_ids", "labels"))
        for name, value in named:
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                ids = _as_ids(value)
                self.recorder.put("data_id", name, ids, micro=self._micro, call=0)

    def _output_hook(self, name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            self._tap(name, first)

        return hook

    def _input_hook(self, name: str) -> Callable[[torch.nn.Module, Any], None]:
        def hook(module: torch.nn.Module, args: Any) -> None:
            if args:
                self._tap(name, args[0])

        return hook

    def _tap(self, name: str, value: Any) -> None:
        if not self._recording() or not isinstance(value, torch.Tensor):
            return
        if not value.is_floating_point():
            return
        call, micro = self._calls.get(("activation", name), 0), self._micro
        self._calls[("activation", name)] = call + 1
        self.recorder.put("activation", name, value, micro=micro, call=call)
        if value.requires_grad:
            recorder = weakref.proxy(self.recorder)

            def on_grad(grad: torch.Tensor) -> None:
                scale = recorder.grad_scale
                recorder.put(
                    "activation_grad", name, grad, grad_scale=scale, micro=micro, call=call
                )

            value.register_hook(on_grad)  # type: ignore[no-untyped-call]

    def _patch_backward(self) -> None:
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._recording():
                roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                if len(roots) == 1 and roots[0].numel() == 1:
                    self._losses.append(local_of(roots[0].detach()).clone())
            original(tensors, *args, **kwargs)

        torch.autograd.backward = backward
        self._undo.append(lambda: setattr(torch.autograd, "backward", original))

    # -- gradients and steps -----------------------------------------------------------------

    def _patch_clipping(self) -> None:
        from torch.nn.utils import clip_grad

        inner = "_clip_grads_with_norm_"
        original = getattr(clip_grad, inner)

        def clip(
            parameters: Any, max_norm: float, total_norm: torch.Tensor, *a: Any, **k: Any
        ) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            if any(id(p) in self._names for p in parameters):
                self._before_clipping(max_norm, total_norm)
            return original(parameters, max_norm, total_norm, *a, **k)

        public = getattr(torch.nn.utils, "clip_grads_with_norm_", None)
        setattr(clip_grad, inner, clip)
        self._undo.append(lambda: setattr(clip_grad, inner, original))
        if public is original:
            torch.nn.utils.clip_grads_with_norm_ = clip
            self._undo.append(lambda: setattr(torch.nn.utils, "clip_grads_with_norm_", original))

    def _before_clipping(self, max_norm: float, total_norm: Any) -> None:
        if not self.recorder.active or self._has_norm():
            return
        self._record_gradients()
        norm = total_norm.full_tensor() if is_dtensor(total_norm) else total_norm
        self.recorder.scalar("grad_norm", norm)
        self.recorder.training["max_grad_norm"] = float(max_norm)
        self.recorder.judging["max_grad_norm"] = float(max_norm)

    def _has_norm(self) -> bool:
        return ("scalar", "grad_norm") in self.recorder._calls

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.recorder.active:
            return
        self._record_gradients()
        if not self._stepped:
            self.recorder.scalar("learning_rate", float(optimizer.param_groups[0]["lr"]))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.recorder.active:
            return
        self._record_state(optimizer)
        self._stepped.add(id(optimizer))
        if len(self._stepped) >= len(self.optimizers):
            self.end_step()

    def end_step(self) -> None:
        """Records the parameters after a step, and writes the step's files."""
        self._record_parameters()
        self.recorder.end_step()
        self._stepped, self._has_gradients, self._losses = set(), False, []
        self._micro = -1
        if self.max_steps is not None and self.recorder.step >= self.max_steps:
            self.detach()
            self.recorder.finish()
            if self.on_last_step is not None:
                self.on_last_step()

    def _record_gradients(self) -> None:
        if self._has_gradients:
            return
        self._has_gradients = True
        self._record_loss()
        for raw, gradient in self._gradients():
            self.recorder.put("grad", self._rename(canonical(raw)), gradient)

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        """The gradients by name, as the optimizer reads them."""
        named = self.model.named_parameters()
        return [(name, p.grad) for name, p in named if p.grad is not None]

    def _record_loss(self) -> None:
        if not self._losses:
            return
        loss = sum_of_losses(self._losses)
        data_axes = [axis for axis in self.recorder.mesh.axes if axis in DATA_AXES]
        reduction = self.recorder.options.loss_reduction
        if self.recorder.mesh.data_degree > 1:
            # Number by number: equal parts over one axis, and none over the axis of degree 1.
            split = {axis: 0 for axis in data_axes}
            self.recorder.scalar("loss_per_dp_rank", loss, layout=split)
        self.recorder.scalar("loss", loss, layout={axis: reduction for axis in data_axes})

    def _record_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            name = self._names.get(id(parameter))
            if name is None:
                continue
            for key, value in sorted(state.items()):
                if not isinstance(value, torch.Tensor):
                    continue
                whole = f"{self._rename(name)}.{key}"
                if value.ndim == 0:
                    number = local_of(value).double().reshape(1)
                    self.recorder.put("optimizer", whole, number, layout="replicate")
                else:
                    self.recorder.put("optimizer", whole, value)

    def _record_parameters(self) -> None:
        for raw, parameter in self.model.named_parameters():
            self.recorder.put("param", self._rename(canonical(raw)), parameter)


def _as_ids(value: torch.Tensor) -> torch.Tensor:
    """Inputs are compared exactly: floating-point ones as their bits."""
    if not value.is_floating_point():
        return value
    sizes = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return local_of(value.detach()).contiguous().view(sizes[value.element_size()])
