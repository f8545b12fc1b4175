# SPDX-License-Identifier: Apache-2.0
"""What makes a model unfit for recording, found before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._safetensors import DTYPES
from .errors import RecordError

_WRAPPER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's model inside DDP, a DeepSpeed engine, torch.compile and the like."""
    while True:
        inner: Any = None
        for name in ("module", "_orig_mod"):
            candidate = model._modules.get(name)
            is_only = len(list(model.children())) == 1
            if isinstance(candidate, torch.nn.Module) and is_only:
                inner = candidate
        if inner is None or not _is_wrapper(model):
            return model
        model = inner


def _is_wrapper(model: torch.nn.Module) -> bool:
    return type(model).__module__.split(".")[0] in ("torch", "deepspeed", "megatron", "accelerate")


def canonical(name: str) -> str:
    """A module's or parameter's name without the wrappers that frameworks put around modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_ATTRIBUTES)


def compiled_root(model: torch.nn.Module) -> torch.nn.Module | None:
    """The torch.compile wrapper around the whole model, if there is one."""
    while _is_wrapper(model):
        if "_orig_mod" in model._modules:
            return model
        inner = model._modules.get("module")
        if inner is None:
            return None
        model = inner
    return None


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether module.compile() was called: its own hooks run inside the compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None


def compiled_names(model: torch.nn.Module) -> list[str]:
    """Names of the outermost modules that torch.compile runs: hooks inside are not called."""
    found: list[str] = []
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or is_compiled(module):
            clean = canonical(name)
            if not any(clean == f or clean.startswith(f + ".") or f == "" for f in found):
                found.append(clean)
    return found


def outside_parameters(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """What optimizers step beside the model's own parameters, as outside.0, outside.1, ..."""
    seen = {id(p) for p in model.parameters()}
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append(parameter)
    return {f"outside.{i}": parameter for i, parameter in enumerate(found)}


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each buffer that checkpoints hold, and whose dtype can be recorded."""
    seen: set[str] = set()
    for prefix, module in model.named_modules():
        for key, value in module.named_buffers(recurse=False):
            name = canonical(f"{prefix}.{key}" if prefix else key)
            is_known = value.dtype in DTYPES and value.dtype != torch.bool
            if key in module._non_persistent_buffers_set or name in seen or not is_known:
                continue
            seen.add(name)
            yield name, value


def random_state() -> list[torch.Tensor]:
    """The states of the generators that a forward pass draws from by default."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def refuse_dropout(model: torch.nn.Module) -> None:
    """Raises if the model draws dropout masks, which no two layouts draw alike."""
    names = [
        (name, module.p)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.modules.dropout._DropoutNd)
        and module.p > 0
        and module.training
    ]
    if names:
        raise RecordError(
            f"Dropout must be 0, got {names[0][1]} in {names[0][0] or 'the model'} "
            f"({len(names)} modules). Masks are drawn differently by every layout. Set it to 0 in "
            "the script, or let --no-dropout (no_dropout=True) do so in all runs."
        )
    config = getattr(model, "config", None)
    drops = {
        key: value
        for key, value in (vars(config) if hasattr(config, "__dict__") else {}).items()
        if "drop" in key and isinstance(value, float) and value > 0 and model.training
    }
    functional = {k: v for k, v in drops.items() if "attention" in k or "attn" in k}
    if functional:
        key, value = next(iter(functional.items()))
        raise RecordError(
            f"Dropout must be 0, got {key} = {value} in the model's config. Set it to 0: masks "
            "are drawn differently by every layout."
        )


def switch_dropout_off(model: torch.nn.Module) -> None:
    """Sets the probability of every dropout module, and of the config, to 0."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in list(vars(module).items()):
            if "dropout" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    config = getattr(model, "config", None)
    for key, value in list(vars(config).items()) if hasattr(config, "__dict__") else []:
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
