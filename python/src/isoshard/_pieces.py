# SPDX-License-Identifier: Apache-2.0
"""Products in pieces, for runs that show how far right runs may differ.

A kernel for few rows or few outputs may add up a long sum in one accumulator, where that for more
of them takes many. A run of many ranks has fewer rows and outputs a rank than one process, and so
other roundings, which weights that are moved by one ulp do not show. docs/internals/tolerances.md
("Pieces") has the figures.

Torch rounds the probabilities of a loss to the digits of a logit, and runs with moved weights may
all round one alike. So they compute the loss from shifted logits, which rounds it anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._calls import unjournaled

#: Functions that are replaced.
REPLACED = ("linear", "addmm", "cross_entropy")
#: Products with more rows (or outputs) have enough of them on each of 16 ranks.
_FEW = 64
_NUM_ROW_PIECES, _NUM_OUTPUT_PIECES = 16, 4


def compute_in_pieces(is_inside: Callable[[], bool]) -> Callable[[], None]:
    """Replaces functions of torch; what is returned puts them back.

    They are torch.nn.functional.linear and cross_entropy, and torch.addmm. `is_inside` says whether
    the recorded model is being called: products outside make its inputs, which must stay.
    """
    owner = torch.nn.functional
    linear, addmm, cross_entropy = owner.linear, torch.addmm, owner.cross_entropy

    @unjournaled()
    def linear_in_pieces(input: Any, weight: Any, bias: Any = None) -> torch.Tensor:  # noqa: A002
        is_vector = bias is None or bias.shape == weight.shape[:1]
        if not is_inside() or not is_vector or not _is_cut(input, weight):
            return linear(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1])
        weights = _outputs(weight)
        biases = [None] * len(weights) if bias is None else _outputs(bias)
        outputs = [
            torch.cat([linear(part, w, b) for w, b in zip(weights, biases, strict=True)], -1)
            for part in _rows(rows)
        ]
        # A copy: a view that the script changes in place would lose the hooks of its gradient.
        return torch.cat(outputs).reshape(*input.shape[:-1], weight.shape[0]).clone()

    @unjournaled()
    def addmm_in_pieces(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs or len(args) != 3 or not is_inside():  # noqa: PLR2004
            return addmm(*args, **kwargs)
        bias, rows, weight = args
        if bias.ndim != 1 or weight.ndim != 2 or not _is_cut(rows, weight.t()):  # noqa: PLR2004
            return addmm(*args)
        return torch.cat([addmm(bias, part, weight) for part in _rows(rows)])

    @unjournaled()
    def shifted_cross_entropy(input: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002
        if type(input) is torch.Tensor and _is_wide(input):
            largest = input.detach().amax(min(1, input.ndim - 1), keepdim=True)  # no mask is
            input = input + torch.where(largest.isfinite(), largest / 3, 0)  # noqa: A001
        return cross_entropy(input, *args, **kwargs)

    def put(*functions: Any) -> None:
        owner.linear, torch.addmm, owner.cross_entropy = functions

    put(linear_in_pieces, addmm_in_pieces, shifted_cross_entropy)

    def undo() -> None:
        put(linear, addmm, cross_entropy)

    return undo


def _is_wide(tensor: torch.Tensor) -> bool:
    """Whether it has elements of 32 or 64 bits, in which torch computes here."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return tensor.numel() > 0 and tensor.is_floating_point() and tensor.element_size() >= 4


def _is_cut(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Sums of 16 bits are made in fp32, whose roundings the result does not show."""
    plain = (torch.Tensor, torch.nn.Parameter)
    if type(rows) not in plain or type(weight) not in plain or weight.ndim != 2:
        return False
    is_wide = _is_wide(rows) and weight.dtype == rows.dtype
    return is_wide and min(rows.numel() // rows.shape[-1], weight.shape[0]) <= _FEW


def _rows(rows: torch.Tensor) -> list[torch.Tensor]:
    if rows.shape[0] > _FEW:
        return [rows]
    return list(rows.split(-(-rows.shape[0] // _NUM_ROW_PIECES)))


def _outputs(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.chunk(_NUM_OUTPUT_PIECES)) if tensor.shape[0] <= _FEW else [tensor]
