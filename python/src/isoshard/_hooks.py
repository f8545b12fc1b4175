# SPDX-License-Identifier: Apache-2.0
"""Hooks that record a training step while the script runs unchanged."""

from __future__ import annotations

import functools
import math
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import _call_sites
from ._buffers import fingerprints
from ._bundle import CLIPPED
from ._calls import BACKWARD, FORWARD, UPDATE, not_journaled
from ._checks import (
    compiled_names,
    is_compiled,
    joined_later,
    not_trained,
    outside_parameters,
    persistent_buffers,
    random_state,
    refuse_dropout,
    replaced_parameters,
)
from ._closer import FunctionTaps
from ._dtensor import is_dtensor, is_set_on_any, local_of, reduced
from ._frozen_tables import watch_of
from ._gradient_watch import GradientWatch
from ._inputs import as_input, tensors_of
from ._mesh import DATA_AXES
from ._names import compiled_root, named_modules, named_parameters, own_class, unwrapped
from ._options import Layout
from ._pieces import compute_in_pieces
from ._recorder import FlatPart, Recorder, sum_of_losses
from ._replay import TARGET, Replay
from ._settings import (
    hyperparameters,
    largest_learning_rate,
    masks_small_gradients,
    training_settings,
)
from ._shared_state import (
    is_shared_out,
    kinds_of,
    own_part,
    states_of,
    states_of_others,
    without_inner,
)
from .errors import IsoshardError, RecordError

#: Recorded at their input, too, under this name: what enters an output projection.
_INPUTS = {"o_proj": "core", "down_proj": "act"}
_SKIPPED = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Dropout)
_SKIPPED_ENDS = ("rotary_emb", "act_fn")
#: Of steps whose learning rate is 0, for which others are recorded.
_MOST_IDLE_STEPS = 8
#: How near a number must be to the norm of the gradients to be that norm, in any dtype.
_SAME_NORM = 0.01


class Hooks:
    """Attaches a recorder to a model and its optimizers; `detach` takes all hooks off again."""

    #: Whether gradients that are cleared are in the parameters' `grad`.
    _forgets = True

    def __init__(
        self,
        recorder: Recorder,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        max_steps: int | None = None,
        on_last_step: Callable[[], None] | None = None,
        on_error: Callable[[IsoshardError], None] | None = None,
    ) -> None:
        self.recorder, self.on_error, self.replay = recorder, on_error, recorder.replay
        self.model = unwrapped(model)
        self.compiled_root = compiled_root(model)
        if not recorder.options.draws_repeat:
            refuse_dropout(self.model)
        self.optimizers = without_inner(optimizers)
        self.max_steps, self.on_last_step = max_steps, on_last_step
        self._undo: list[Callable[[], None]] = []
        self._losses: list[torch.Tensor] = []
        self._micro = -1
        self._inputs: list[torch.Tensor] = []  # of this forward pass
        self._samples = 0  # of the script's own in this forward pass
        self._calls: dict[tuple[str, str], int] = {}  # of this forward pass
        self._recorded: set[str] = set()  # names of this step's gradients
        self._clipped: set[str] = set()  # those that are recorded as the optimizer reads them, too
        self.watch = GradientWatch(self._parameters, lambda: recorder.sites.see(_call_sites.CLIP))
        self._has_losses = self._is_paused = self._is_in_backward = self._has_ended = False
        # What activation gradients are multiplied with before all else: ranks of cp have their
        # part of each sample's mean.
        is_mean = recorder.options.loss_reduction == "avg"
        self._grad_factor = 1.0 / recorder.mesh.axes.get("cp", 1) if is_mean else 1.0
        self._is_backward_split = False  # whether parts of backward run twice, with equal values
        self._random_state: list[torch.Tensor] | None = None
        self._stepped: set[int] = set()
        self._is_cleared = False  # whether gradients were cleared since backward
        self._unused: set[int] = set()  # micro-batches that backward has not come to
        self._passes_since_step = 0  # backward passes after the last step
        self._is_open = False  # whether a step was made whose parameters may still change
        self._uncast: dict[str, torch.Tensor] = {}  # the parameters before a cast after such a step
        self._names = {id(p): n for n, p in named_parameters(self.model)}
        self.outside = outside_parameters(self.model, self.optimizers)
        self._check_optimizers()
        self._names.update({id(p): name for name, p in self.outside.items()})
        try:
            self._begin(model)
        except BaseException:
            self.detach()
            raise

    def _begin(self, model: torch.nn.Module) -> None:
        """Attaches the hooks, and records what is known before the first step."""
        recorder = self.recorder
        self._attach(model)
        if recorder.is_response:
            self._compute_in_pieces()
        elif recorder.world_size == 1:
            self._watch_tables()
        recorder.training.update(training_settings(self.model, kinds_of(self.optimizers)))
        self._set_judging()
        for name, buffer in persistent_buffers(self.model):
            recorder.dtypes.begin(name, buffer)
        own = fingerprints(self.model)
        recorder.buffers = {self._rename(name): value for name, value in own.items()}
        self._record_parameters()
        recorder.place_parameters()

    # -- attaching ---------------------------------------------------------------------------

    def _check_optimizers(self) -> None:
        for optimizer in self.optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            known = [p for p in held if id(p) in self._names]
            if not known:
                number = replaced_parameters(self.model, self.optimizers, has_gradients=False)
                raise RecordError(
                    f"The optimizer must step parameters of the recorded model "
                    f"({own_class(self.model).__name__}), got {type(optimizer).__name__} with "
                    f"{len(held)} other tensors, {number} of which have the shapes of parameters "
                    "that no optimizer holds. Build it after the model is wrapped (fully_shard "
                    "replaces all parameters), or record with isoshard.record(directory, model, "
                    "optimizer)."
                )

    def _watch_tables(self) -> None:
        """Looks which frozen parameters of 16 bits are tables, in all forward passes."""
        watch = watch_of(self._parameters())
        if watch is None or self.compiled_root is not None or compiled_names(self.model):
            return
        self.recorder.dtypes.tables = watch
        self._undo.append(watch.close)
        self._keep(self.model.register_forward_pre_hook(lambda *_: watch.begin(), prepend=True))
        self._keep(self.model.register_forward_hook(lambda *_: watch.end(), always_call=True))

    def _compute_in_pieces(self) -> None:
        depth = 0
        if self.compiled_root is not None or compiled_names(self.model):
            return  # what is compiled is made again by other code than what was compiled

        def change(by: int) -> None:
            nonlocal depth
            depth += by

        self._keep(self.model.register_forward_pre_hook(lambda *_: change(1), prepend=True))
        self._keep(self.model.register_forward_hook(lambda *_: change(-1), always_call=True))
        # Backward makes again what is checkpointed.
        in_backward = torch._C._current_graph_task_id
        self._undo.append(compute_in_pieces(lambda: depth > 0 or in_backward() != -1))

    def _attach(self, called: torch.nn.Module) -> None:
        """`called` is the model with its wrappers, which may gather parameters for their call."""
        for module in {id(m): m for m in (called, self.model)}.values():
            inner = self.compiled_root is not None and module is self.model
            if inner or is_compiled(module):
                continue  # it would be compiled, too; _on_batch comes before the compiled code
            before = self._guarded(self._before_any_pass)
            self._keep(module.register_forward_pre_hook(before, prepend=True))
        self._attach_root()
        if self.recorder.options.activations:
            compiled = compiled_names(self.model) if self.compiled_root is None else [""]
            self._attach_activations(compiled)
        for optimizer in self.optimizers:
            self._keep(optimizer.register_step_pre_hook(self._guarded(self._before_step)))
            self._keep(optimizer.register_step_post_hook(self._guarded(self._after_step)))
        self._patch_clipping()
        self._patch_backward()
        self._patch_end_of_groups()
        self._patch_clearing()
        self._patch_casts({id(called), id(self.model)})
        if self.recorder.functions is not None:
            self._attach_functions(self.recorder.functions)
        labels = self.recorder.labels
        if not labels.is_installed:
            self._undo.append(labels.install())
        labels.micro = self._micro_under_way

    def _patch_casts(self, modules: set[int]) -> None:
        """Keeps the parameters as a step left them before the script casts or moves the model."""

        def keep() -> None:
            self._uncast = {n: p.detach().to("cpu", copy=True) for n, p in self._parameters()}

        def before(module: torch.nn.Module, *_args: Any, **_kwargs: Any) -> None:
            if self._is_open and not self._uncast and id(module) in modules:
                self._guarded(keep)()

        self._run_before(torch.nn.Module, "_apply", before)

    def _attach_functions(self, taps: FunctionTaps) -> None:
        modules = {self._rename(name): module for name, module in named_modules(self.model)}
        if taps.module in modules:
            for handle in taps.attach(modules[taps.module], self._guarded(self._tap)):
                self._keep(handle)

    def _micro_under_way(self) -> int | None:
        return self._micro if self._recording() and self._micro >= 0 else None

    def _attach_root(self) -> None:
        """Hooks on the module that is called with a batch."""
        root = self.model if self.compiled_root is None else self.compiled_root
        if is_compiled(root):
            self._wrap_compiled(root, self._on_batch, self._after_batch)
        else:
            before, after = self._guarded(self._on_batch), self._guarded(self._after_batch)
            self._keep(root.register_forward_pre_hook(before, with_kwargs=True))
            self._keep(root.register_forward_hook(after))

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; its errors are told to the driver even if the script catches them."""

        @not_journaled
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                told = error if isinstance(error, IsoshardError) else _of_the_recorder(error)
                if self.on_error is not None:
                    self.on_error(told)
                if told is error:
                    raise
                raise told from error

        return call

    def _wrap_compiled(
        self,
        module: torch.nn.Module,
        before: Callable[[torch.nn.Module, Any, Any], None],
        after: Callable[[torch.nn.Module, Any, Any], None],
    ) -> None:
        """Calls `before` and `after` at the border of a module whose hooks are compiled."""
        compiled: Any = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            self._guarded(before)(module, args, kwargs)
            result = compiled(*args, **kwargs)
            self._guarded(after)(module, args, result)
            return result

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
        for name, module in named_modules(self.model):
            last = name.rpartition(".")[2]
            if not name or name in seen or isinstance(module, _SKIPPED) or last in _SKIPPED_ENDS:
                continue
            if any(c == "" or name.startswith(c + ".") for c in compiled):
                continue
            seen.add(name)
            if is_compiled(module):
                self._wrap_compiled(module, _nothing, self._output_hook(self._rename(name)))
                continue
            hook = self._guarded(self._output_hook(self._rename(name)))
            self._keep(module.register_forward_hook(hook))
            if last in _INPUTS:
                point = ".".join([*name.split(".")[:-1], _INPUTS[last]])
                before = self._guarded(self._input_hook(self._rename(point)))
                self._keep(module.register_forward_pre_hook(before))

    def _keep(self, handle: Any) -> None:
        self._undo.append(handle.remove)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replaces a function of a module, class or object until the hooks are taken off."""
        original, is_own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, function)

        def undo() -> None:
            if is_own:
                setattr(owner, name, original)
            else:  # a method of the object's class
                delattr(owner, name)

        self._undo.append(undo)

    def _run_before(self, owner: Any, name: str, before: Callable[..., None]) -> None:
        """Calls `before` with the same arguments before each call of a function."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            before(*args, **kwargs)
            return original(*args, **kwargs)

        self._replace(owner, name, call)

    def _rename(self, name: str) -> str:
        return self.recorder.options.name(name)

    def _set_judging(self) -> None:
        is_sum = self.recorder.options.loss_reduction == "sum"
        self.recorder.judging.update(
            {
                "mask_small_gradients": masks_small_gradients(kinds_of(self.optimizers)),
                "activation_grad_scale": 1 if is_sum else "dp",
                "partial": ["scalar/loss", "activation/*", "activation_grad/*"],
            }
        )
        if self.recorder.mesh.data_degree == 1:
            self.recorder.not_recorded["scalar/loss_per_dp_rank"] = "one process has one loss"

    def finish(self) -> None:
        """Ends a step that is open, and takes all hooks off."""
        if self._active:
            self._guarded(self._close)()
        if self._active and self.recorder.world_size > 1 and self._passes_since_step:
            self._guarded(self._leave_unfinished)()
        self.detach()

    @not_journaled
    def _leave_unfinished(self) -> None:
        self._record_parameters(is_final=True)
        self.recorder.leave_unfinished(self._passes_since_step)

    def detach(self) -> None:
        """Takes all hooks off."""
        self.recorder.journal.stop()
        self.watch.end()
        self._end_replay()
        while self._undo:
            self._undo.pop()()

    # -- forward and backward ----------------------------------------------------------------

    @property
    def _active(self) -> bool:
        return self.recorder.active and not self._has_ended

    def _recording(self) -> bool:
        return (
            self._active
            and not self._is_paused
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1  # else recomputed for backward
        )

    def _before_any_pass(self, module: torch.nn.Module, args: Any) -> None:
        """A forward pass reads what the script has made of the parameters after a step."""
        if self._recording():
            self.watch.pause()
            self._close()

    def _on_batch(
        self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any] | None = None
    ) -> None:
        """Without kwargs, as torch calls a hook that was taken off in this very call."""
        if kwargs is None or not self._recording():
            return
        self._close()
        self._end_replay()
        self._forget_if_cleared()
        self._micro += 1
        self._calls = {}
        self.recorder.journal.phase = FORWARD
        self.recorder.sites.see(_call_sites.FORWARD)
        named = [(f"input{i}" if i else "input_ids", v) for i, v in enumerate(args)]
        named += sorted(kwargs.items(), key=lambda item: item[0] not in ("input_ids", "labels"))
        inputs = [found for whole, argument in named for found in tensors_of(whole, argument)]
        given = [(name, value) for name, value in inputs if value.grad_fn is None and value.ndim]
        self._samples = len(given[0][1]) if given else 0
        if self.replay is not None:
            self.replay.replace(self.recorder.step, self._micro, given)
        for name, value in inputs:
            if value.grad_fn is not None:
                self._tap(name, value)  # something in front of the model is trained, too
        for name, value in given:
            self._record_input(name, value)
        self._inputs = [value for _, value in given]
        self._random_state = random_state()

    def _record_input(self, name: str, value: torch.Tensor) -> None:
        self.recorder.put("data_id", name, as_input(value), micro=self._micro, call=0)

    def _watch_loss(self, replay: Replay, output: Any) -> None:
        """Records the tensors that the loss takes until backward begins (see LossInputs)."""
        number = 0

        def see(tensor: torch.Tensor) -> None:
            nonlocal number
            name = f"{TARGET}{number or ''}"
            number += 1
            replay.replace(self.recorder.step, self._micro, [(name, tensor)])
            self._record_input(name, tensor)

        known = [*self.model.parameters(), *self.model.buffers(), *self._inputs]
        known += [tensor for _, tensor in tensors_of("", output)]
        replay.loss_inputs.begin(self._samples, known, see)

    def _end_replay(self) -> None:
        """Gives the script's tensors their own values back, if they have others."""
        self._inputs = []
        if self.replay is not None:
            self.replay.loss_inputs.end()
            self.replay.restore()

    def _after_batch(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Random numbers of a forward pass are drawn differently by every layout."""
        if self._recording():
            self._expect_backward(output)
            if self.replay is not None and self._samples:
                self._watch_loss(self.replay, output)
        before, self._random_state = self._random_state, None
        if before is None or not self._recording() or self.recorder.options.allow_draws:
            return
        after = random_state()
        if len(after) != len(before) or any(
            not torch.equal(a, b) for a, b in zip(after, before, strict=True)
        ):
            raise RecordError(
                f"The forward pass of {type(self.model).__name__} must draw no random numbers, got "
                "some (dropout of attention or LSTM layers, F.dropout, noise): every layout draws "
                "others. Set them to 0 in the script, try --no-dropout (no_dropout=True), or if "
                "they change no value, allow_draws = True in --options FILE.py (allow_draws=True)."
            )

    def _expect_backward(self, output: Any) -> None:
        """Counts a pass as a micro-batch only if its output gets a gradient."""
        micro, unused = self._micro, self._unused
        parts = [t for _, t in tensors_of("", output) if t.requires_grad]
        if parts:
            unused.add(micro)
        for part in parts:
            hooked: Any = part
            hooked.register_hook(lambda gradient: unused.discard(micro))

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
        self.recorder.sites.see(f"activation/{name}/{call}")
        self.recorder.put("activation", name, value, micro=micro, call=call)
        if value.requires_grad:
            recorder, factor = weakref.proxy(self.recorder), self._grad_factor
            is_split, done = self._is_backward_split, False

            def on_grad(grad: torch.Tensor) -> None:
                nonlocal done
                if is_split and done:
                    return
                done = True
                scale = recorder.grad_scale
                own = grad if factor == 1.0 else grad * factor
                recorder.put("activation_grad", name, own, grad_scale=scale, micro=micro, call=call)

            value.register_hook(on_grad)  # type: ignore[no-untyped-call]

    def _patch_backward(self) -> None:
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self.replay is not None:
                self.replay.loss_inputs.end()
            is_inner, self._is_in_backward = self._is_in_backward, True
            is_outer = self._recording() and not is_inner
            if is_outer:
                self._guarded(self._close)()
            is_outer = is_outer and self._recording()
            if is_outer:
                self.watch.end()
                self._forget_incomplete()
                self.recorder.journal.phase = BACKWARD
                self.recorder.sites.see(_call_sites.BACKWARD)
                roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
                self._passes_since_step += 1
                if len(roots) == 1 and roots[0].numel() == 1:
                    self._losses.append(local_of(roots[0].detach()).clone())
            try:
                original(tensors, *args, **kwargs)  # a TorchFunctionMode calls this one again
            finally:
                self._is_in_backward = is_inner
                if is_outer:
                    self.recorder.journal.phase = UPDATE
                    self._guarded(self.watch.begin)()

        self._replace(torch.autograd, "backward", backward)

    # -- gradients and steps -----------------------------------------------------------------

    def _patch_clipping(self) -> None:
        from torch.nn.utils import clip_grad

        inner = "_clip_grads_with_norm_"
        original = getattr(clip_grad, inner)

        def clip(
            parameters: Any, max_norm: float, total_norm: torch.Tensor, *a: Any, **k: Any
        ) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            mine = {self._names[id(p)] for p in parameters if id(p) in self._names}
            if mine:
                self._guarded(self._before_clipping)(mine, max_norm, total_norm)
            return original(parameters, max_norm, total_norm, *a, **k)

        public = getattr(torch.nn.utils, "clip_grads_with_norm_", None)
        self._replace(clip_grad, inner, clip)
        if public is original:
            self._replace(torch.nn.utils, "clip_grads_with_norm_", clip)

    def _before_clipping(self, names: set[str], max_norm: float, total_norm: Any) -> None:
        self._close()
        if not self._active:
            return
        self._record_gradients(names)
        self.watch.leave(names)
        if self._has_norm():
            return
        norm = total_norm.full_tensor() if is_dtensor(total_norm) else total_norm
        self.recorder.scalar("grad_norm", norm)
        self.recorder.sites.see(_call_sites.CLIP)
        self.recorder.training["max_grad_norm"] = float(max_norm)
        self.recorder.judging["max_grad_norm"] = float(max_norm)

    def _has_norm(self) -> bool:
        return ("scalar", "grad_norm") in self.recorder._calls

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._close()
        if not self._active:
            return None
        self.watch.pause()
        self._refuse_unknown(optimizer)
        self.recorder.sites.see(_call_sites.STEP)
        self._record_rate()
        self._record_hyperparameters(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._record_gradients_of(optimizer)
            return None

        def recorded() -> Any:
            """The closure makes the gradients; an optimizer may call it several times."""
            result = closure()
            self.after_closure(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": recorded}
        return (args[0], recorded, *args[2:]), kwargs

    def after_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of a step's first closure call count; later calls are not recorded."""
        if self._active and not self._is_paused:
            self.watch.pause()
            self._guarded(self._record_gradients_of)(optimizer)
            self._is_paused = True

    def begin_in_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """For a recording that begins in a step, with the model's first call in its closure."""
        if self._active and optimizer in self.optimizers:
            self._guarded(self._record_rate)()
            self._guarded(self._record_hyperparameters)(optimizer)
            self.after_closure(optimizer)

    def _refuse_unknown(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises if a parameter has joined since the recording began: nothing says its name."""
        joined = [
            f"{list(parameter.shape)} of group {number}"
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if id(parameter) not in self._names
        ]
        if joined:
            own = {id(p): n for n, p in named_parameters(self.model)}
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            names = [n for i, n in own.items() if i in held and i not in self._names] or joined
            raise joined_later(names, self.recorder.step)

    def _record_rate(self) -> None:
        if not self._stepped:
            self.recorder.learning_rate(largest_learning_rate(*self.optimizers))

    def _record_hyperparameters(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            numbers = hyperparameters(group)
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None:
                    whole = f"{self._rename(name)}.hyperparameters"
                    self.recorder.number(whole, numbers)

    def _record_gradients_of(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients that a step reads; with the last optimizer those that none reads, too."""
        names: set[str] | None = None
        if len(self._stepped | {id(optimizer)}) >= len(self.optimizers):
            self._refuse_replaced()
        else:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            names = {self._names[id(p)] for p in held if id(p) in self._names}
        self.watch.see_replaced()
        self._record_gradients(names)
        self.recorder.scaled.update({self._rename(n): f for n, f in self.watch.scaled.items()})
        self._record_clipped(names)

    def _refuse_replaced(self) -> None:
        """Raises if an optimizer holds what was in the model once: it is no parameter outside."""
        if self.outside:
            number = replaced_parameters(self.model, self.optimizers, has_gradients=True)
            if number > 0:
                raise not_trained(self.model, number)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._active:
            return
        self._is_paused = False
        self._stepped.add(id(optimizer))
        is_last = len(self._stepped) >= len(self.optimizers)
        self._record_state(optimizer, is_final=is_last)
        if is_last:
            self._end_update()
        else:
            self.watch.resume()

    def _end_update(self) -> None:
        """All optimizers have made their step. It stays open, for what the script does after it."""
        if not self._recorded and self.recorder.world_size == 1:
            raise RecordError(
                f"An optimizer step must have gradients, got none in step {self.recorder.step}. "
                "Let the script call backward before it, and not zero_grad in between."
            )
        self.recorder.backward_passes = self._passes_since_step
        self.recorder.has_no_gradients = not self._recorded  # other ranks may have them
        if len(self._unused) <= self._micro:
            self.recorder.forget_micro_batches(self._unused)
        self.recorder.complete_clipped()
        self._record_buffers()
        self.recorder.end_update()
        self._begin_anew()
        self._passes_since_step = 0
        self._is_open = True

    def _begin_anew(self) -> None:
        """What comes now belongs to another step, or to another attempt at the same one."""
        self._stepped, self._recorded, self._losses = set(), set(), []
        self._clipped = set()
        self.watch.end()
        self._has_losses = self._is_cleared = False
        self._unused = set()
        self._micro = -1

    @not_journaled
    def _close(self) -> None:
        """Records the parameters as the next forward pass reads them; writes the step's files.

        Ranks: local. One rank may come here alone, such as for an evaluation.
        """
        if not self._is_open or not self._active:
            return
        self._is_open = False
        self._record_parameters(is_final=True)
        self._uncast = {}
        self.recorder.end_step()
        # A step whose rate is 0 shows nothing, as the first one of a warm-up: another one is made
        # up for it.
        idle = min(self.recorder.idle_steps, _MOST_IDLE_STEPS)
        if self.max_steps is not None and self.recorder.step >= self.max_steps + idle:
            self._has_ended = True
            self.detach()
            if self.on_last_step is not None:
                self.on_last_step()

    def _patch_end_of_groups(self) -> None:
        """Ends a step before the script leaves its ranks: training is over then."""
        if not dist.is_available():
            return

        def before(*args: Any, **kwargs: Any) -> None:
            if kwargs.get("group", args[0] if args else None) in (None, dist.group.WORLD):
                self._guarded(self._close)()

        self._run_before(dist, "destroy_process_group", before)

    def _patch_clearing(self) -> None:
        """Notes that gradients are cleared, which a step has not read if one is under way."""

        def before(*_args: Any, **_kwargs: Any) -> None:
            self._is_cleared |= bool(self._losses) and self._active

        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._run_before(owner, "zero_grad", before)

    def _forget_if_cleared(self) -> None:
        """Forgets passes whose gradients no step has read, as those that a loss scaler leaves out.

        A pass to warm up is one of them, too. If it was a micro-batch that the script has lost, its
        samples are missing beside a reference that has it (_data.check_samples says why).
        """
        if not self._forgets or not self._is_cleared or self._stepped:
            return
        self._is_cleared = False
        gradients = (local_of(p.grad) for _, p in self._parameters() if p.grad is not None)
        if not any(bool(gradient.any()) for gradient in gradients):
            self.recorder.forget_attempt(self._micro + 1)
            self._begin_anew()

    @not_journaled
    def _record_gradients(self, names: set[str] | None = None) -> None:
        """Records gradients that were not recorded yet in this step: of these names, or all."""
        if not self._has_losses:
            self._has_losses = True
            self._record_loss()
        self._name_calls()
        for name, gradient in self._gradients():
            if name not in self._recorded and (names is None or name in names):
                self._recorded.add(name)
                value = reduced(self.watch.before.get(name, gradient))
                self.recorder.put("grad", self._rename(name), value)

    @not_journaled
    def _record_clipped(self, names: set[str] | None) -> None:
        """Records gradients as the optimizer reads them, if the script has clipped any of them.

        One rank may clip although others do not; _settle adds the records that these lack.
        """
        has_clipped = self.watch.has_clipped
        if self.recorder.comparison is not None:
            has_clipped = self.recorder.comparison.has_clipped(self.recorder.step)
        if self.recorder.takes_own_norms:
            self._record_own_norm()
        gradients = [
            (name, gradient)
            for name, gradient in self._gradients()
            if name not in self._clipped and (names is None or name in names)
        ]
        has_clipped = is_set_on_any(has_clipped, [gradient for _, gradient in gradients])
        for name, gradient in gradients if has_clipped else ():
            self._clipped.add(name)
            value = reduced(gradient)
            self.recorder.put("grad", self._rename(name), value, ending=CLIPPED)

    def _record_own_norm(self) -> None:
        """Records the norm that the script has clipped by, if it has computed that itself.

        In one process it must be that of the gradients: some scripts clip by other numbers. What
        ranks have is left out where the single process has none (_settle).
        """
        norm = self.watch.norm()
        if norm is None or self._has_norm():
            return
        recorder = self.recorder
        if recorder.world_size > 1:
            recorder.scalar("grad_norm", norm)
            recorder.has_own_norm = True
            return
        own = dict(self._gradients())
        before = _norm_of(self.watch.before.get(name, grad) for name, grad in own.items())
        if not math.isclose(norm, before, rel_tol=_SAME_NORM):
            return
        recorder.scalar("grad_norm", norm)
        after = _norm_of(own.values())
        if after < before:
            recorder.judging["max_grad_norm"] = norm * after / before

    def _forget_incomplete(self) -> None:
        """Forgets gradients that were clipped before this backward pass adds to them."""
        if self._recorded and not self._stepped:
            self._recorded, self._has_losses = set(), False
            self.recorder.forget_gradients()

    def _name_calls(self) -> None:
        """Tells the journal which memory is whose gradient, or parameter."""
        named = self._parameters()
        own = [(f"gradient of {n}", p.grad) for n, p in named]
        own += [(f"parameter {n}", p.detach()) for n, p in named]
        self.recorder.journal.name_tensors((n, local_of(t)) for n, t in own if t is not None)

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        """What the parameters have as their `grad`, which may be a sum over ranks still."""
        return [(n, p.grad) for n, p in self._parameters() if p.grad is not None]

    def _record_loss(self) -> None:
        if not self._losses:
            return
        self.recorder.dtypes.losses |= {loss.dtype for loss in self._losses}
        self.recorder.losses = [float(loss) for loss in self._losses]
        loss = sum_of_losses(self._losses)
        mesh = self.recorder.mesh
        data_axes = [axis for axis in mesh.axes if axis in DATA_AXES]
        reduction = self.recorder.options.loss_reduction
        if mesh.data_degree > 1 and mesh.axes.get("cp", 1) == 1:
            # Number by number: equal parts over one axis, and none over the axis of degree 1.
            split = {axis: 0 for axis in data_axes}
            self.recorder.scalar("loss_per_dp_rank", loss, layout=split)
        axes = [*data_axes, "cp"] if "cp" in mesh.axes else data_axes
        self.recorder.scalar("loss", loss, layout=dict.fromkeys(axes, reduction))

    def _record_state(self, optimizer: torch.optim.Optimizer, *, is_final: bool) -> None:
        for parameter, state in states_of(optimizer).items():
            name = self._names.get(id(parameter))
            if name is None:
                continue
            for key, value in sorted(state.items()):
                if not isinstance(value, torch.Tensor):
                    continue
                whole = f"{self._rename(name)}.{key}"
                is_number = value.numel() == 1 and value.shape != parameter.shape
                is_number |= value.ndim == 0
                number = local_of(value).double().reshape(1) if is_number else None
                kept = value if number is None else number
                layout: Layout | FlatPart | None = None if number is None else "replicate"
                if is_shared_out(optimizer):
                    layout = own_part(kept)
                self.recorder.put("optimizer", whole, kept, layout=layout, is_final=is_final)
        if self.recorder.world_size > 1 and is_shared_out(optimizer):
            for parameter, key, nothing, place in states_of_others(optimizer):
                name = self._names.get(id(parameter))
                if name is not None:
                    whole = f"{self._rename(name)}.{key}"
                    self.recorder.put("optimizer", whole, nothing, layout=place)

    def _record_parameters(self, *, is_final: bool = False) -> None:
        """If the script cast the model after a step, records the values from before that."""
        for name, parameter in self._parameters():
            uncast = self._uncast.get(name, parameter)
            is_cast = uncast.dtype != parameter.dtype or parameter.is_meta
            value = uncast if is_cast else parameter
            self.recorder.put("param", self._rename(name), value, is_final=is_final)

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The model's parameters and those outside, by name."""
        return [*named_parameters(self.model), *self.outside.items()]

    def _record_buffers(self) -> None:
        """What a step leaves in persistent buffers, such as running means."""
        for name, value in persistent_buffers(self.model):
            self.recorder.dtypes.after_step(name, value)
            whole = value.reshape(1) if value.ndim == 0 else value
            self.recorder.put("optimizer", f"{self._rename(name)}.buffer", whole)


def _norm_of(gradients: Iterable[torch.Tensor]) -> float:
    return math.hypot(*(float(local_of(g).double().norm()) for g in gradients))


def _of_the_recorder(error: Exception) -> RecordError:
    """What is said of an error that this package, or a function of the options, has raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return RecordError(
        f"The recorder must be able to record this step, got {type(error).__name__}: {error} (in "
        f"{frame.name}, {Path(frame.filename).name}:{frame.lineno}). The script itself has not "
        "failed. Correct the options' transform or rename if they raised it; if not, please report "
        "it."
    )


def _nothing(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """For a border of which only the other side is recorded."""
