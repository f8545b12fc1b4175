# SPDX-License-Identifier: Apache-2.0
"""A model without what frameworks put around and into it: wrappers, and FSDP2's gathered tensors.

Names of modules and parameters are those that the user's own classes give, in every order of DDP,
FSDP2, torch.compile and checkpoint wrappers, around the model and inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: Children that only wrappers have.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_FRAMEWORKS = ("torch", "deepspeed", "megatron", "accelerate")


def own_class(module: torch.nn.Module) -> type:
    """The class of a module before FSDP2 gave it a class of its own."""
    classes = (c for c in type(module).__mro__ if not c.__module__.startswith("torch.distributed."))
    return next(classes)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's model inside DDP, a DeepSpeed engine, torch.compile and the like."""
    while (name := _name_of_wrapped(model)) in ("module", "_orig_mod"):
        model = getattr(model, name)
    return model


def compiled_root(model: torch.nn.Module) -> torch.nn.Module | None:
    """The torch.compile wrapper around the whole model, if there is one."""
    while (name := _name_of_wrapped(model)) in ("module", "_orig_mod"):
        if name == "_orig_mod":
            return model
        model = getattr(model, name)
    return None


def _name_of_wrapped(module: torch.nn.Module) -> str:
    """The name of the child that a framework's wrapper stands for, or nothing."""
    for name in _WRAPPED:
        if name in module._modules:
            return name
    is_only = [name for name, _ in module.named_children()] == ["module"]
    return "module" if is_only and own_class(module).__module__.split(".")[0] in _FRAMEWORKS else ""


def named_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """As model.named_modules(); a wrapper and what it wraps have the same name."""
    names: dict[str, tuple[str, str]] = {}  # and the name of what it wraps
    for raw, module in model.named_modules():
        outer, _, last = raw.rpartition(".")
        name, wrapped = names.get(outer, ("", "")) if raw else ("", "")
        if raw and last != wrapped:
            name = f"{name}.{last}" if name else last
        names[raw] = (name, _name_of_wrapped(module))
        yield name, module


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name and parameter, each as optimizers hold it.

    FSDP2 puts gathered tensors into the modules for a forward pass. They stay there behind a
    forward pass without gradients (those of each root, and of blocks that do not reshard), while
    the optimizer holds the shards, which then are in no module.
    """
    shards, seen = _shards_by_id(model), set[int]()
    for name, module in named_modules(model):
        for last, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{name}.{last}" if name else last, shards.get(id(parameter), parameter)


def _shards_by_id(model: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """FSDP2's shard for each tensor that it has gathered, by the id of that one.

    A parameter that a script or library has put in place of a shard is a shard itself. FSDP2 takes
    it over in the next forward pass.
    """
    found: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        group = getattr(state, "_fsdp_param_group", None)
        for parameter in getattr(group, "fsdp_params", ()):
            for name in ("_unsharded_param", "_sharded_post_forward_param"):
                found[id(getattr(parameter, name, None))] = parameter.sharded_param
    found.pop(id(None), None)
    return found


def reshard(model: torch.nn.Module) -> None:
    """Lets FSDP2 gather anew for the next forward pass, which then reads changed shards."""
    module: Any
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            module.reshard()
