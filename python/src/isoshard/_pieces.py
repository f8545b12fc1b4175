# SPDX-License-Identifier: Apache-2.0
"""Products in pieces, for runs that show how far right runs may differ.

A kernel for few rows or few outputs may add up a long sum in one accumulator, where that for more
of them takes many. A run of many ranks has fewer rows and outputs a rank than one process, and so
other roundings, which weights that are moved by one ulp do not show. docs/tolerances.md ("Pieces")
has the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Products with more rows (or outputs) have enough of them on each of 16 ranks.
_FEW = 64
_NUM_ROW_PIECES, _NUM_OUTPUT_PIECES = 16, 4


def compute_in_pieces() -> Callable[[], None]:
    """Replaces torch.nn.functional.linear and torch.addmm; what is returned puts them back."""
    owner = torch.nn.functional
    linear, addmm = owner.linear, torch.addmm

    def linear_in_pieces(input: Any, weight: Any, bias: Any = None) -> torch.Tensor:  # noqa: A002
        if not _is_cut(input, weight) or input.ndim == 0:
            return linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1])
        weights = _outputs(weight)
        biases = [None] * len(weights) if bias is None else _outputs(bias)
        outputs = [
            torch.cat([linear(part, w, b) for w, b in zip(weights, biases, strict=True)], -1)
            for part in _rows(rows)
        ]
        return torch.cat(outputs).reshape(*input.shape[:-1], weight.shape[0])

    def addmm_in_pieces(input: Any, mat1: Any, mat2: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002
        if kwargs or not _is_cut(mat1, mat2.t()) or input.ndim != 1:
            return addmm(input, mat1, mat2, **kwargs)
        return torch.cat([addmm(input, part, mat2) for part in _rows(mat1)])

    owner.linear, torch.addmm = linear_in_pieces, addmm_in_pieces  # type: ignore[assignment]

    def undo() -> None:
        owner.linear, torch.addmm = linear, addmm  # type: ignore[assignment]

    return undo


def _is_cut(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Sums of 16 bits are made in fp32, whose roundings the result does not show."""
    plain = (torch.Tensor, torch.nn.Parameter)
    if type(rows) not in plain or type(weight) not in plain or weight.ndim != 2:
        return False
    if rows.numel() == 0 or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    is_wide = rows.dtype in (torch.float32, torch.float64) and weight.dtype == rows.dtype
    return is_wide and min(rows.numel() // rows.shape[-1], weight.shape[0]) <= _FEW


def _rows(rows: torch.Tensor) -> list[torch.Tensor]:
    if rows.shape[0] > _FEW:
        return [rows]
    return list(rows.split(-(-rows.shape[0] // _NUM_ROW_PIECES)))


def _outputs(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.chunk(_NUM_OUTPUT_PIECES)) if tensor.shape[0] <= _FEW else [tensor]
