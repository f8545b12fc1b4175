# SPDX-License-Identifier: Apache-2.0
"""Names the places where two dtypes are one key: rows of a table that became one, and wrong rows.

All names are equal, so `{torch.float32: 4, torch.bfloat16: 2}` has one row. A table asks whether
two keys are equal when it is made and when it is read, and the instruction that asked tells which.
"""

from __future__ import annotations

import dis
from types import FrameType

import torch

from . import _names
from ._imports import is_of_a_library, is_of_python
from ._names import asked
from ._notes import note

#: Instructions that make a table, or add a row.
_MAKING = (
    "BUILD_MAP",
    "BUILD_SET",
    "MAP_ADD",
    "SET_ADD",
    "DICT_UPDATE",
    "DICT_MERGE",
    "SET_UPDATE",
)
_COMPARING = ("COMPARE_OP", "CONTAINS_OP")  # branches, which the verdict names as such
_WIDE = (torch.float64, torch.complex128)
_seen: set[tuple[int, int]] = set()  # instructions that were looked at


def install() -> None:
    """From here on each comparison of two names is looked at."""
    _names.on_one_key = _see


def _see(a: torch.dtype, b: torch.dtype, frame: FrameType | None) -> None:
    in_python = False
    while frame is not None and is_of_python(frame.f_code.co_filename):
        frame, in_python = frame.f_back, True
    if frame is None:
        return
    code = frame.f_code
    if (id(code), frame.f_lasti) in _seen:
        return
    _seen.add((id(code), frame.f_lasti))
    operation = "CALL" if in_python else dis.opname[code.co_code[frame.f_lasti]]
    if operation in _COMPARING:
        return
    place = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
    both = " and ".join(sorted({str(asked(a)), str(asked(b))}))
    if operation in _MAKING:
        note(f"the table at {place} has one row for {both}")
    elif not is_of_a_library(code.co_filename) and not _is_wide(a) and not _is_wide(b):
        note(f"{both} are one key at {place}")


def _is_wide(dtype: torch.dtype) -> bool:
    return any(asked(dtype) is wide for wide in _WIDE)
