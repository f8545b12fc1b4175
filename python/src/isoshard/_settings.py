# SPDX-License-Identifier: Apache-2.0
"""What manifest.json says of a run: training settings, versions of frameworks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from ._names import named_parameters
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


_ADAM_MODULES = {"torch", "deepspeed", "apex", "transformer_engine"}
_ADAM_NAMES = {"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"}


def _first(values: Sequence[Any]) -> Any:
    return values[0]


#: Key in a group of parameters, name of the setting, which group's value counts.
_HYPERPARAMETERS: tuple[tuple[str, str, Callable[[Sequence[Any]], Any]], ...] = (
    ("lr", "learning_rate", max),
    ("weight_decay", "weight_decay", max),
    ("eps", "eps", min),
    ("momentum", "momentum", _first),
    ("nesterov", "nesterov", _first),
)


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


def optimizer_settings(*optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Kind and hyperparameters of optimizers, under the names of docs/reference/report.md.

    Where groups of parameters differ, the numbers are those that allow the largest step, because
    the judge bounds by them what a step may move (harness/trace/masked_steps.h). Other
    optimizers than Adam move by other rules: they say `moment_decays` in place of `beta1` and
    `beta2`, without which the judge has no bound. SGD beside Adam moves an element by less than
    its rate where the gradient is noise.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    kinds = sorted({type(optimizer).__name__.lower() for optimizer in optimizers})
    settings: dict[str, Any] = {"kind": "+".join(kinds)}
    for key, name, choose in _HYPERPARAMETERS:
        values = [_number(g[key]) for g in groups if g.get(key) is not None]
        if values:
            settings[name] = choose(values)
    betas = [list(map(_number, g["betas"])) for g in groups if _is_pair(g.get("betas"))]
    is_bounded = all(_steps_as_adam(o) or type(o) is torch.optim.SGD for o in optimizers)
    if betas and is_bounded and all(b == betas[0] for b in betas):
        settings["beta1"], settings["beta2"] = betas[0]
    elif betas:
        settings["moment_decays"] = betas[0] if all(b == betas[0] for b in betas) else betas
    return settings


#: The numbers of a group of parameters that are recorded for each of its parameters, in the order
#: of src/core/observe/hyperparameters.h.
_OF_A_GROUP = (
    "lr",
    "weight_decay",
    "eps",
    "betas",
    "momentum",
    "dampening",
    "nesterov",
    "maximize",
)


def hyperparameters(group: Mapping[str, Any]) -> torch.Tensor:
    """The numbers by which a group's parameters are stepped: fp64 [9], 0 where it has none."""
    numbers: list[float] = []
    for key in _OF_A_GROUP:
        value = group.get(key)
        if key == "betas":
            numbers += map(_real, value) if _is_pair(value) else (0.0, 0.0)
        else:
            numbers.append(_real(value))
    return torch.tensor(numbers, dtype=torch.float64)


def _real(value: Any) -> float:
    """The one number that a value is; 0 if it is none, as Adafactor's pair of eps."""
    number = _number(value)
    return float(number) if isinstance(number, (bool, int, float)) else 0.0


def largest_learning_rate(*optimizers: torch.optim.Optimizer) -> float | None:
    """The largest rate of all groups of parameters; None for optimizers that have none."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return max((float(g["lr"]) for g in groups if g.get("lr") is not None), default=None)


def _steps_as_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known that no step is larger than Adam's rule allows.

    Classes that others wrote may leave out the correction of the bias, or scale steps by more.
    """
    kind = type(optimizer)
    return kind.__module__.split(".")[0] in _ADAM_MODULES and kind.__name__ in _ADAM_NAMES


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def training_settings(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Any]:
    """What decides the numbers and must be the same in both runs; never the world size."""
    settings: dict[str, Any] = {}
    for _, parameter in named_parameters(model):
        if parameter.is_floating_point():
            settings["dtype"] = dtype_name(parameter.dtype, "a parameter")
            break
    if optimizers:
        settings["optimizer"] = optimizer_settings(*optimizers)
    if len(optimizers) > 1:
        settings["optimizers"] = [optimizer_settings(o) for o in optimizers]
    return settings


def masks_small_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether a step is a sign where the gradient is noise, of a size that is known.

    The judge leaves out what such a step does to an element, but for the size. Without a bound it
    leaves nothing out.
    """
    return bool(optimizers) and "beta1" in optimizer_settings(*optimizers)


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item()
    return value if isinstance(value, (bool, int, float, str)) else str(value)
