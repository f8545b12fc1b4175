# SPDX-License-Identifier: Apache-2.0
"""The tensors that a model is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ._dtensor import local_of


def tensors_of(name: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of an argument, also inside mappings and sequences, with names."""
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        items = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(i), part) for i, part in enumerate(value)]
    else:
        return []
    return [found for key, part in items for found in tensors_of(f"{name}.{key}", part)]


def as_real(value: torch.Tensor) -> torch.Tensor:
    """A complex tensor as real and imaginary parts in one more dim; others as they are."""
    if not value.is_complex():
        return value
    return torch.view_as_real(local_of(value.detach()).resolve_conj())


def as_input(value: torch.Tensor) -> torch.Tensor:
    """A model's input as it is recorded: a bundle has no name for floats of 8 bits."""
    value = as_real(value)
    if not value.is_floating_point() or value.element_size() > 1:
        return value
    return local_of(value.detach()).contiguous().view(torch.uint8)
