# SPDX-License-Identifier: Apache-2.0
"""Records steps of Megatron-Core: its optimizers read gradients from main_grad.

Three of its optimizers are known: FP32Optimizer, Float16OptimizerWithFloat16Params (fp32 masters)
and DistributedOptimizer (each data-parallel rank holds a flat range of each gradient, master and
state). What is cut into ranges is put together over the data-parallel group (collective).
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ._calls import not_journaled
from ._dtypes import is_float32
from ._hooks import Hooks
from ._names import named_parameters, unwrapped
from ._options import Layout
from ._perturb import perturb
from ._recorder import Recorder
from ._settings import largest_learning_rate, masks_small_gradients, optimizer_settings
from .errors import IsoshardError, RecordError

_OPTIMIZERS = "megatron.core.optimizer.optimizer"
_PLAIN, _MIXED, _DISTRIBUTED = (
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "DistributedOptimizer",
)
#: Switches of Transformer Engine; which attention runs is decided by them after start.
_ENGINE_PREFIX = "NVTE_"
_DETERMINISM = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")


def _is_of(value: object, name: str) -> bool:
    return any(
        c.__name__ == name and c.__module__.startswith("megatron.core.")
        for c in type(value).__mro__
    )


def is_megatron(module: object) -> bool:
    """Whether a module is one of Megatron-Core's, or wrapped by its DistributedDataParallel."""
    return _is_of(module, "MegatronModule")


def is_megatron_optimizer(optimizer: object) -> bool:
    """Whether this is an optimizer of megatron.core.optimizer; torch.optim has none of them."""
    return _is_of(optimizer, "MegatronOptimizer")


def watch(found: list[weakref.ref[Any]]) -> None:
    """From now on lists the optimizers that Megatron-Core builds, if it is imported."""
    module: Any = sys.modules.get(_OPTIMIZERS)
    if module is None or hasattr(module.MegatronOptimizer, "_isoshard_watched"):
        return
    for kind in (module.MegatronOptimizer, module.ChainedOptimizer):
        _watch_class(kind, found)
    module.MegatronOptimizer._isoshard_watched = True


def _watch_class(kind: Any, found: list[weakref.ref[Any]]) -> None:
    original = kind.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        found.append(weakref.ref(self))

    kind.__init__ = init


def optimizers_of(module: torch.nn.Module, watched: list[weakref.ref[Any]]) -> list[Any]:
    """The outermost of the watched optimizers that step parameters of a module."""
    alive = [o for o in (ref() for ref in watched) if o is not None]
    inner = {id(i) for o in alive for i in getattr(o, "chained_optimizers", [])}
    own = {id(p) for p in module.parameters()}
    return [
        o
        for o in alive
        if id(o) not in inner and any(id(p) in own for i in parts_of(o) for p in parameters_of(i))
    ]


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers of a chain that step something on this rank."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o for o in chained if not getattr(o, "is_stub_optimizer", False)]


def parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
    """The model's parameters that an optimizer steps (of a part of each, if it is distributed)."""
    kind = _kind_of(optimizer)
    if kind == _PLAIN:
        return list(optimizer.get_parameters())
    if kind == _MIXED:
        groups = [*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups]
        return [p for group in groups for p in group]
    return list(optimizer.model_param_group_index_map)


def _kind_of(optimizer: Any) -> str:
    name = type(optimizer).__name__
    if name not in (_PLAIN, _MIXED, _DISTRIBUTED):
        raise RecordError(
            f"An optimizer of Megatron-Core must be {_PLAIN}, {_MIXED} or {_DISTRIBUTED}, got "
            f"{name}. Train with one of these."
        )
    return name


def perturb_megatron(
    module: torch.nn.Module, optimizers: list[Any], seed: int, tables: Collection[str] = ()
) -> None:
    """Moves each weight but tables by one ulp, and makes the optimizers' masters anew from them."""
    perturb(unwrapped(module), seed, tables=tables)
    for optimizer in optimizers:
        optimizer.reload_model_params()


def megatron_settings(config: Any) -> dict[str, Any]:
    """Attention backend and deterministic flags, as they are in this process now."""
    backend = getattr(config, "attention_backend", None)
    switches = {k: v for k, v in os.environ.items() if k.startswith(_ENGINE_PREFIX)}
    return {
        "attention_backend": getattr(backend, "name", str(backend)),
        "transformer_engine": " ".join(f"{k}={v}" for k, v in sorted(switches.items())) or "unset",
        "deterministic_mode": bool(getattr(config, "deterministic_mode", False)),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
        **{key.lower(): os.environ.get(key, "unset") for key in _DETERMINISM},
    }


@not_journaled
def _same_on_all_ranks(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, if all ranks have them; rank 0 writes them for all."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return settings
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, settings)
    for rank, other in enumerate(everyone):
        for key, value in settings.items():
            if other[key] != value:
                raise RecordError(
                    f"All ranks must have the same {key}, got {everyone[0][key]} on rank 0 and "
                    f"{other[key]} on rank {rank}. Set it alike in the environment of all ranks."
                )
    return settings


class MegatronHooks(Hooks):
    """As Hooks, with a Megatron-Core optimizer's step in place of a torch optimizer's."""

    _forgets = False

    def __init__(
        self,
        recorder: Recorder,
        model: torch.nn.Module,
        optimizers: list[Any],
        *,
        max_steps: int | None = None,
        on_last_step: Callable[[], None] | None = None,
        on_error: Callable[[IsoshardError], None] | None = None,
    ) -> None:
        if len(optimizers) != 1:
            raise RecordError(
                f"One Megatron-Core optimizer must step the model, got {len(optimizers)}. Give "
                "get_megatron_optimizer all model chunks at once."
            )
        self.megatron = optimizers[0]
        self.parts = parts_of(self.megatron)
        for part in self.parts:
            _kind_of(part)
            scaler = getattr(part, "grad_scaler", None)
            if scaler is not None and float(scaler.scale) != 1:
                raise RecordError(
                    f"The loss scale must be 1, got {float(scaler.scale)}: gradients would be "
                    "recorded with it. Train in bf16 or fp32."
                )
        super().__init__(
            recorder, model, max_steps=max_steps, on_last_step=on_last_step, on_error=on_error
        )
        inner = self.parts[0].optimizer
        config = self.megatron.config
        recorder.training["optimizer"] = optimizer_settings(inner)
        if config.clip_grad > 0:  # else gradients are not clipped
            recorder.training["max_grad_norm"] = float(config.clip_grad)
            recorder.judging["max_grad_norm"] = float(config.clip_grad)
        inners = [part.optimizer for part in self.parts]
        recorder.judging["mask_small_gradients"] = masks_small_gradients(inners)
        own = megatron_settings(getattr(self.model, "config", None))
        recorder.training["megatron"] = _same_on_all_ranks(own)
        for name, wrapper in (("prepare_grads", self._prepared), ("step", self._stepped_by)):
            original = getattr(self.megatron, name)
            self._replace(self.megatron, name, functools.partial(wrapper, original))

    def _prepared(self, original: Callable[..., Any]) -> Any:
        """Gradients are reduced, and not clipped yet."""
        self._guarded(self._close)()
        result = original()
        if self.recorder.active:
            self._guarded(self._record_gradients)()
            self.recorder.learning_rate(largest_learning_rate(self.megatron))
        return result

    def _stepped_by(self, original: Callable[..., Any]) -> Any:
        result = original()
        if self.recorder.active:
            self._guarded(self._after_megatron_step)(result[1])
        return result

    def _after_megatron_step(self, norm: Any) -> None:
        if norm is not None:
            self.recorder.scalar("grad_norm", float(norm))
        for part in self.parts:
            for parameter, key, value in self._states_of(part):
                name = self._rename(self._names[id(parameter)])
                self.recorder.put("optimizer", f"{name}.{key}", value)
        self._end_update()

    # -- what an optimizer holds -------------------------------------------------------------

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """In the same order on all ranks."""
        return [(n, p) for n, p in named_parameters(self.model) if p.requires_grad]

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        ranges: dict[int, Any] = {}
        shared: dict[int, Any] = {}
        for part in self.parts:
            if _kind_of(part) == _DISTRIBUTED:
                for parameter in parameters_of(part):
                    ranges[id(parameter)] = part._get_model_param_range_map(parameter)["param"]
                shared.update({id(p): part for p in self._all_parameters_of(part)})
        found = []
        for name, parameter in self._trained():
            grad = getattr(parameter, "main_grad", parameter.grad)
            if grad is None:
                continue
            if id(parameter) in shared:
                held = ranges.get(id(parameter))
                flat = None if held is None else grad.reshape(-1)[held.start : held.end]
                group = shared[id(parameter)].data_parallel_group
                grad = _together(name, parameter, held, flat, group, grad.dtype)
            if grad is not None:
                found.append((name, grad))
        return found

    @staticmethod
    def _all_parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
        """Of a distributed optimizer: also those of which other ranks hold the range."""
        return [p for buffer in optimizer.buffers for p in buffer.params]

    def _states_of(self, part: Any) -> Iterator[tuple[torch.nn.Parameter, str, torch.Tensor]]:
        kind, inner = _kind_of(part), part.optimizer
        keys = self._keys(inner)
        if kind == _DISTRIBUTED:
            yield from self._ranges_of(part, keys)
            return
        for parameter in parameters_of(part):
            master = getattr(parameter, "main_param", parameter) if kind == _MIXED else parameter
            if master is not parameter:
                yield parameter, "master", master
            state = inner.state.get(master, {})
            for key in keys:
                if isinstance(state.get(key), torch.Tensor):
                    yield parameter, key, state[key]

    def _ranges_of(
        self, part: Any, keys: list[str]
    ) -> Iterator[tuple[torch.nn.Parameter, str, torch.Tensor]]:
        # Not by model_param_group_index_map: its order is another one where dtypes are mixed.
        shards = {
            id(parameter): shard
            for models, masters in (
                (part.model_fp32_groups, part.shard_fp32_groups),
                (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            )
            for group, held in zip(models, masters, strict=True)
            for parameter, shard in zip(group, held, strict=True)
        }
        known = {id(p) for p in self._all_parameters_of(part)}
        for name, parameter in self._trained():
            if id(parameter) not in known:
                continue
            span, own = None, {}
            shard = shards.get(id(parameter))
            if shard is not None:
                span = part._get_model_param_range_map(parameter)["param"]
                own = {"param": shard, **part.optimizer.state.get(shard, {})}
            wanted = {key: key for key in keys}
            if not is_float32(parameter.dtype):
                wanted = {"master": "param", **wanted}
            for key, theirs in wanted.items():
                flat, group = own.get(theirs), part.data_parallel_group
                what = f"{name}.{key}"
                whole = _together(what, parameter, span, flat, group, torch.float32)
                if whole is not None:
                    yield parameter, key, whole

    @staticmethod
    def _keys(inner: torch.optim.Optimizer) -> list[str]:
        group = inner.param_groups[0]
        if "betas" in group:
            return ["exp_avg", "exp_avg_sq"]
        return ["momentum_buffer"] if group.get("momentum", 0) else []


@not_journaled
def _together(
    what: str,
    parameter: torch.Tensor,
    held: Any,
    flat: torch.Tensor | None,
    group: Any,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """The whole of what ranks of a group hold flat ranges of (collective in the group).

    None if no rank has anything of it: zeros in its place would agree with other zeros.
    Raises RecordError on all ranks if the ranges leave elements out, or overlap.
    """
    whole = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
    count = torch.zeros(1, dtype=torch.int64, device=parameter.device)
    if held is not None and flat is not None:
        whole[held.start : held.end] = flat.detach().reshape(-1)
        count += flat.numel()
    dist.all_reduce(whole, group=group)
    dist.all_reduce(count, group=group)
    if not int(count):
        return None
    if int(count) != parameter.numel():
        raise RecordError(
            f"Data-parallel ranks must hold all {parameter.numel()} elements of {what} together, "
            f"got {int(count)}. Is the optimizer's state of another version than its parameters?"
        )
    return whole.reshape(parameter.shape)


# -- preset --------------------------------------------------------------------------------------


def preset(module: torch.nn.Module) -> Callable[[str, str, torch.Tensor], Any]:
    """A transform (level 2) for a GPTModel: what the local tensors of all layouts have in common.

    Activations [s, b, ...] become [b, s, ...], because samples are dim 0 of a bundle's tensors. The
    halves of a gated linear_fc1 become linear_fc1.gate and linear_fc1.up: each rank has a piece of
    each half, which is no piece of the whole. So do states of the optimizer that have the rows of
    such a parameter; its number of steps has none. A fused linear_qkv is cut by groups of heads as
    they lie, so it needs nothing.
    """
    config: Any = getattr(unwrapped(module), "config", None)
    is_gated = bool(getattr(config, "gated_linear_unit", False))
    is_sequence_cut = bool(getattr(config, "sequence_parallel", False)) and any(
        getattr(part, "reduce_scatter_embeddings", False) for part in module.modules()
    )
    rows = {p.shape[:1] for n, p in named_parameters(module) if "linear_fc1" in n}

    def transform(kind: str, name: str, tensor: torch.Tensor) -> Any:
        is_activation = kind in ("activation", "activation_grad")
        if is_activation and _is_sequence_first(name, tensor, is_sequence_cut):
            tensor = tensor.transpose(0, 1)
        at = name.rfind("linear_fc1")
        rest = name[at + len("linear_fc1") :].lstrip(".")
        if (
            at < 0
            or not is_gated
            or kind == "data_id"
            or rest.partition(".")[0].startswith("layer_")
            or (kind == "optimizer" and tensor.shape[:1] not in rows)
        ):
            return tensor
        dim = tensor.ndim - 1 if is_activation else 0
        gate, up = tensor.chunk(2, dim)
        stem = name[: at + len("linear_fc1")]
        return {
            ".".join(part for part in (stem, half, rest) if part): value
            for half, value in (("gate", gate), ("up", up))
        }

    return transform


def layouts(module: torch.nn.Module) -> dict[str, Layout]:
    """Where all ranks share one group of keys: each uses it for heads of its own."""
    config: Any = getattr(unwrapped(module), "config", None)
    is_shared = getattr(config, "num_query_groups", None) == 1
    if not is_shared or getattr(config, "tensor_model_parallel_size", 1) == 1:
        return {}
    summed: Layout = {"dp": 0, "tp": "sum"}
    return {"activation_grad/*.k_layernorm": summed}


def _is_sequence_first(name: str, tensor: torch.Tensor, is_sequence_cut: bool) -> bool:
    last = name.rpartition(".")[2]
    if last in ("q_layernorm", "k_layernorm"):
        return tensor.ndim == 4
    if last == "word_embeddings":  # transposed behind it, or inside of it to be cut
        return is_sequence_cut and tensor.ndim == 3
    return tensor.ndim == 3
