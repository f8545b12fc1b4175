# SPDX-License-Identifier: Apache-2.0
"""Finds results of collectives that nobody reads, such as that of `all_reduce(x.contiguous())`.

A collective in place writes its result into the tensor that it is given. If that tensor is a copy
that dies while the script is still at the call, and nothing else has its memory, no later line can
have read the result. No number is needed to know that.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_PASSED_OVER = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
#: Torch's functions for collectives. A collective that other code of torch calls has a tensor that
#: this code reads.
_COLLECTIVES = ("distributed_c10d.py", "c10d_logger.py")
#: Packages that pass torch's collectives on.
_WRAPPERS = (os.path.join(os.sep, "deepspeed", "comm", ""),)
_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


@functools.cache
def _is_passed_over(filename: str) -> bool:
    return filename.startswith((*_PASSED_OVER, "<")) or filename.endswith("contextlib.py")


def frame_of_caller() -> FrameType | None:
    """The innermost frame that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_passed_over(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _frame_of_collective() -> FrameType | None:
    """The frame that calls a collective of torch.distributed itself; None if torch does."""
    frame: FrameType | None = sys._getframe(1)
    inner = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_passed_over(file) and not any(wrapper in file for wrapper in _WRAPPERS):
            return frame if os.path.basename(inner) in _COLLECTIVES else None
        if _is_passed_over(file):
            inner = file
        frame = frame.f_back
    return None


def watch_unread(tensor: torch.Tensor, tell: Callable[[], None]) -> Any:
    """Calls `tell` if the tensor and its memory die before the caller's frame goes on.

    Returns what has to be kept for as long as it shall be watched, or None where this version of
    torch does not count the owners of memory. A call with async_op=True is not watched: its work
    holds the tensor.
    """
    frame = _frame_of_collective()
    if _count is None or frame is None or tensor.layout != torch.strided:
        return None
    count, at, key = _count, frame.f_lasti, id(frame)
    memory = _memory_of(tensor)

    def died(_: Any) -> None:
        now: FrameType | None = sys._getframe()
        while now is not None and id(now) != key:
            now = now.f_back
        if now is not None and now.f_lasti == at and count(memory) <= _owners_at_death():
            tell()

    return weakref.ref(tensor, died)


def _memory_of(tensor: torch.Tensor) -> int:
    untyped: Any = tensor.untyped_storage()
    return int(untyped._cdata)


@functools.cache
def _owners_at_death() -> int:
    """The owners that torch counts of the memory of a tensor that dies, where nobody shares it."""
    assert _count is not None
    count, found = _count, [0]
    tensor = torch.empty(1)
    memory = _memory_of(tensor)
    watch = weakref.ref(tensor, lambda _: found.append(count(memory)))
    del tensor
    assert watch() is None
    return found[-1]
