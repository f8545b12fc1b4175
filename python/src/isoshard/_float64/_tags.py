# SPDX-License-Identifier: Apache-2.0
"""Which dtype the script asked for when it made a tensor; that of the memory, shared by views.

Only what is asked for in other dtypes than float32 is kept.
"""

from __future__ import annotations

import torch

from ._notes import see_made

_ATTRIBUTE = "_isoshard_asked"
_has_tags = False


def asked_of(tensor: torch.Tensor) -> torch.dtype:
    """float32 where nothing else is known."""
    if not tensor.is_floating_point():
        return tensor.dtype
    try:
        dtype: torch.dtype = getattr(_local(tensor).untyped_storage(), _ATTRIBUTE, _FLOAT32)
    except (RuntimeError, NotImplementedError):
        return _FLOAT32
    return dtype


def tag(tensor: torch.Tensor, asked: torch.dtype) -> None:
    """Remembers what a new tensor was asked for."""
    global _has_tags
    if asked is _FLOAT32 or not tensor.is_floating_point():
        return
    see_made(asked)
    try:
        setattr(_local(tensor).untyped_storage(), _ATTRIBUTE, asked)
        _has_tags = True
    except (RuntimeError, NotImplementedError):  # a tensor without memory
        return


def has_tags() -> bool:
    """Whether anything was asked for in another dtype than float32."""
    return _has_tags


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


_FLOAT32 = torch.float32
