# SPDX-License-Identifier: Apache-2.0
"""What makes a model unfit for recording, found before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from ._names import named_modules, named_parameters, own_class
from ._safetensors import DTYPES
from .errors import NotTrained, RecordError


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether module.compile() was called: its own hooks run inside the compiled code."""
    return getattr(module, "_compiled_call_impl", None) is not None


def compiled_names(model: torch.nn.Module) -> list[str]:
    """Names of the outermost modules that torch.compile runs: hooks inside are not called."""
    found: list[str] = []
    for name, module in named_modules(model):
        is_one = "_orig_mod" in module._modules or is_compiled(module)
        if is_one and not any(name == f or name.startswith(f + ".") or f == "" for f in found):
            found.append(name)
    return found


def outside_parameters(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """What optimizers step beside the model's own parameters, as outside.0, outside.1, ..."""
    seen = {id(p) for _, p in named_parameters(model)}
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.append(parameter)
    return {f"outside.{i}": parameter for i, parameter in enumerate(found)}


def replaced_parameters(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, has_gradients: bool
) -> int:
    """Number of parameters that optimizers hold in place of newer ones of the model.

    Such a parameter has no gradient and is not in the model, where another one of its shape is in
    no optimizer, and has a gradient (`has_gradients`: backward has run).
    """
    own = {id(p): p for _, p in named_parameters(model) if p.requires_grad}
    held = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
    old = [p for p in held.values() if id(p) not in own and p.requires_grad and p.grad is None]
    free = [p for i, p in own.items() if i not in held]
    new = [p for p in free if p.grad is not None or not has_gradients]
    return sum((Counter(p.shape for p in old) & Counter(p.shape for p in new)).values())


def not_trained(model: torch.nn.Module, number: int) -> NotTrained:
    """The finding that so many of a model's parameters were replaced."""
    parameters, were = ("parameter", "it was") if number == 1 else ("parameters", "they were")
    return NotTrained(
        f"The optimizer holds {number} {parameters} that {own_class(model).__name__} no longer "
        f"has; {were} replaced after the optimizer was made, for example by fully_shard. The "
        "training never updates what the model has instead. Make the optimizer after the model is "
        "wrapped, parallelized and loaded."
    )


def joined_later(names: Sequence[str], step: int) -> RecordError:
    """The refusal of parameters that an optimizer got after the recording had begun."""
    return RecordError(
        f"All that is trained must be in the model and in its optimizers when the model is first "
        f"called, got {len(names)} parameters that joined before step {step}: "
        f"{', '.join(names[:4])}. Build them before the first step, or record the part of the "
        "training that comes after with isoshard.record."
    )


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each buffer that checkpoints hold, and whose dtype can be recorded."""
    seen: set[str] = set()
    for prefix, module in named_modules(model):
        for key, value in module.named_buffers(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
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


def draws_masks(model: torch.nn.Module) -> bool:
    """Whether a module of the model is a dropout that is not switched off."""
    kind = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(m, kind) and m.p > 0 and m.training for m in model.modules())


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
