# SPDX-License-Identifier: Apache-2.0
"""What manifest.json says of a run: training settings, versions of frameworks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch

from ._safetensors import dtype_name

#: Module name -> name of its distribution.
FRAMEWORKS = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "megatron.core": "megatron-core",
    "peft": "peft",
    "lightning": "lightning",
    "torchtitan": "torchtitan",
}


def versions() -> dict[str, str]:
    """The versions of the frameworks that this process has imported."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for module, distribution in FRAMEWORKS.items():
        if module in sys.modules:
            try:
                found[distribution] = _version(distribution)
            except metadata.PackageNotFoundError:
                version = getattr(sys.modules[module], "__version__", None)
                if isinstance(version, str):
                    found[distribution] = version
    return found


@functools.cache
def _version(distribution: str) -> str:
    """Reading it takes milliseconds."""
    return metadata.version(distribution)


def package_version() -> str:
    """The version of this package."""
    try:
        return _version("isoshard")
    except metadata.PackageNotFoundError:
        return "0.0.0"


def optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Kind and hyperparameters of an optimizer, under the names of docs/report.md."""
    group = optimizer.param_groups[0]
    settings: dict[str, Any] = {"kind": type(optimizer).__name__.lower()}
    names = {"lr": "learning_rate", "weight_decay": "weight_decay", "eps": "eps"}
    for key, name in {**names, "momentum": "momentum", "nesterov": "nesterov"}.items():
        if key in group and group[key] is not None:
            settings[name] = _number(group[key])
    betas = group.get("betas")
    if isinstance(betas, (tuple, list)) and len(betas) == 2:
        settings["beta1"], settings["beta2"] = _number(betas[0]), _number(betas[1])
    return settings


def training_settings(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """What decides the numbers and must be the same in both runs; never the world size."""
    settings: dict[str, Any] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            settings["dtype"] = dtype_name(parameter.dtype, "a parameter")
            break
    if len(optimizers) == 1:
        settings["optimizer"] = optimizer_settings(optimizers[0])
    elif optimizers:
        settings["optimizers"] = [optimizer_settings(o) for o in optimizers]
    return settings


def is_adam_like(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether a step is a sign where the gradient is noise."""
    return any(
        "adam" in type(o).__name__.lower() or "betas" in o.param_groups[0] for o in optimizers
    )


def coarsest_setting(recorded: set[torch.dtype], losses: set[torch.dtype]) -> dict[str, str]:
    """What `judging` says of a model in fp64 whose loss is computed in fp32, as transformers' is.

    No recorded tensor shows that: numbers are stored in fp64. Gradients begin with the loss, so
    they are rounded as it is. `recorded` has the floating dtypes of all tensors but numbers. A
    loss in 16 bits alone allows nothing, because floors of all tensors would be those of 16 bits.
    """
    is_rounded = recorded == {torch.float64} and torch.float32 in losses
    return {"coarsest_dtype": "fp32"} if is_rounded else {}


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    return value if isinstance(value, (bool, int, float, str)) else str(value)
