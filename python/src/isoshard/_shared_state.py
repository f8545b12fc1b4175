# SPDX-License-Identifier: Apache-2.0
"""Optimizers of which each data-parallel rank steps some parameters for all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ._recorder import FlatPart


def is_shared_out(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch.distributed.optim.ZeroRedundancyOptimizer."""
    names = (f"{c.__module__}.{c.__name__}" for c in type(optimizer).__mro__)
    return any(
        name.startswith("torch.distributed.optim.") and name.endswith(".ZeroRedundancyOptimizer")
        for name in names
    )


def without_inner(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers but those that step a rank's parameters inside of another one."""
    inner = {id(_inner(o)) for o in optimizers if is_shared_out(o)}
    return [o for o in optimizers if id(o) not in inner]


def kinds_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers whose kind and settings count."""
    return [_inner(o) if is_shared_out(o) else o for o in optimizers]


def states_of(optimizer: torch.optim.Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
    """The states that this rank has."""
    return (_inner(optimizer) if is_shared_out(optimizer) else optimizer).state


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = optimizer.optim
    return found


def own_part(state: torch.Tensor) -> FlatPart:
    """The place of a state that this rank alone has."""
    return FlatPart(list(state.shape), 0)


def states_of_others(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[torch.Tensor, str, torch.Tensor, FlatPart]]:
    """Parameter, key, an empty tensor and its place for each state that another rank has.

    A rank of which no parameter was stepped does not know which states there are.
    """
    states, shapes = states_of(optimizer), dict[str, torch.Tensor]()
    for state in states.values():
        shapes.update({k: v for k, v in state.items() if isinstance(v, torch.Tensor)})
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in states or parameter.grad is None:
                continue
            for key, value in sorted(shapes.items()):
                is_number = value.ndim == 0
                shape = [1] if is_number else list(parameter.shape)
                dtype = torch.float64 if is_number else value.dtype
                yield parameter, key, torch.empty(0, dtype=dtype), FlatPart(shape, 0)
