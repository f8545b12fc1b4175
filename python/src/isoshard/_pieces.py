# SPDX-License-Identifier: Apache-2.0
"""Products in pieces, for runs that show how far right runs may differ.

A kernel for few rows or few outputs may add up a long sum in one accumulator, where that for more
of them takes many. A run of many ranks has fewer rows and outputs a rank than one process, and so
other roundings, which weights that are moved by one ulp do not show. docs/tolerances.md ("Pieces")
has the figures.

A loss near 0 is the difference of a logit and a logarithm, which torch rounds to the digits of the
logit: runs with moved weights may all round it alike. So they compute the loss with more digits, and
its gradient from logits that are shifted, which rounds each probability anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

#: Products with more rows (or outputs) have enough of them on each of 16 ranks.
_FEW = 64
_NUM_ROW_PIECES, _NUM_OUTPUT_PIECES = 16, 4
#: More logits would need too much memory.
_MOST_LOGITS = 1 << 24


def compute_in_pieces() -> Callable[[], None]:
    """Replaces functions of torch; what is returned puts them back.

    They are torch.nn.functional.linear and cross_entropy, and torch.addmm.
    """
    owner = torch.nn.functional
    linear, addmm, cross_entropy = owner.linear, torch.addmm, owner.cross_entropy

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

    def finer_cross_entropy(input: Any, target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: A002
        if type(input) is not torch.Tensor or not _is_wide(input):
            return cross_entropy(input, target, *args, **kwargs)
        shift = input.detach().abs().amax() / 3
        loss = cross_entropy(input + shift, target, *args, **kwargs)
        with torch.no_grad():
            rounded = cross_entropy(input, target, *args, **kwargs)
            finer = _finer(cross_entropy, input, target, args, kwargs)
            # what is rounded to 0 has no size that another value could be compared with
            wanted = torch.where((rounded != 0) & finer.isfinite(), finer, rounded.to(finer.dtype))
            change = (wanted - loss).to(loss.dtype)
        return loss + torch.where(change.isfinite(), change, 0)

    def put(*functions: Any) -> None:
        owner.linear, torch.addmm, owner.cross_entropy = functions

    put(linear_in_pieces, addmm_in_pieces, finer_cross_entropy)

    def undo() -> None:
        put(linear, addmm, cross_entropy)

    return undo


def _finer(
    cross_entropy: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    target: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """The loss with more digits; as torch has it where that is not known."""
    if logits.element_size() == 4 and not args and kwargs.get("weight") is None:
        wide = target.double() if target.is_floating_point() else target
        return cross_entropy(logits.double(), wide, **kwargs)
    is_plain = not args and set(kwargs) <= {"ignore_index", "reduction"} and logits.ndim == 2
    if logits.element_size() == 8 and is_plain and logits.shape[1] > 1 and target.ndim == 1:
        return _of_class_ids(logits, target, **kwargs)
    return cross_entropy(logits, target, *args, **kwargs)


def _of_class_ids(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    """log(1 + the sum of the others' exp(logit - target's logit)), which cancels nothing."""
    is_counted = target != ignore_index
    ids = torch.where(is_counted, target, 0).unsqueeze(1)
    own = logits.gather(1, ids).squeeze(1)
    others = torch.logsumexp(logits.scatter(1, ids, -math.inf), 1)
    losses = torch.logaddexp(torch.zeros_like(own), others - own) * is_counted
    if reduction == "none":
        return losses
    return losses.sum() / is_counted.sum() if reduction == "mean" else losses.sum()


def _is_wide(logits: torch.Tensor) -> bool:
    is_small = 0 < logits.numel() <= _MOST_LOGITS
    return is_small and logits.is_floating_point() and logits.element_size() >= 4 and not _is_traced()


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")


def _is_cut(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Sums of 16 bits are made in fp32, whose roundings the result does not show."""
    plain = (torch.Tensor, torch.nn.Parameter)
    if type(rows) not in plain or type(weight) not in plain or weight.ndim != 2:
        return False
    if rows.numel() == 0 or _is_traced():
        return False
    is_wide = rows.dtype in (torch.float32, torch.float64) and weight.dtype == rows.dtype
    return is_wide and min(rows.numel() // rows.shape[-1], weight.shape[0]) <= _FEW


def _rows(rows: torch.Tensor) -> list[torch.Tensor]:
    if rows.shape[0] > _FEW:
        return [rows]
    return list(rows.split(-(-rows.shape[0] // _NUM_ROW_PIECES)))


def _outputs(tensor: torch.Tensor) -> list[torch.Tensor]:
    return list(tensor.chunk(_NUM_OUTPUT_PIECES)) if tensor.shape[0] <= _FEW else [tensor]
