# SPDX-License-Identifier: Apache-2.0
"""Operations without a float64 kernel, written with operations that have one.

Others that have none end the run, and their error is the reason why float64 gives no verdict.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

_KEYS = ("CPU", "CUDA")
_kept: list[torch.library.Library] = []  # a kernel lives as long as its library


def install() -> None:
    """Puts kernels in place of torch's, below autograd and DTensor, which know the operations."""
    if not hasattr(torch.ops.aten, "_grouped_mm"):
        return
    untyped: Any = torch.library
    library = untyped.Library("aten", "IMPL")
    with warnings.catch_warnings():  # that there was a kernel before
        warnings.simplefilter("ignore")
        for key in _KEYS:
            library.impl("_grouped_mm", _grouped_mm, key)
    _kept.append(library)


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Products of groups, as in mixtures of experts.

    Shapes: a [G, M, K] or [rows, K], b [G, K, N] or [K, columns]. A matrix is cut at `offs` along
    the dim that the other operand has G of: rows of a, columns of b, or K where both are matrices.
    Rows and columns behind the last group are zeros.
    """
    if offs is None:
        out = a @ b
        return out if bias is None else out + bias
    ends = [int(end) for end in offs]
    groups = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if a.ndim == 2 and b.ndim == 2:
        out = torch.stack([a[:, group] @ b[group] for group in groups])
        return out if bias is None else out + bias
    if a.ndim == 2:
        parts = [a[group] @ b[i] for i, group in enumerate(groups)]
        rest = a.new_zeros(len(a) - ends[-1], b.shape[-1])
        dim = 0
    else:
        parts = [a[i] @ b[:, group] for i, group in enumerate(groups)]
        rest = a.new_zeros(a.shape[1], b.shape[1] - ends[-1])
        dim = 1
    if bias is not None:
        parts = [part + bias[i] for i, part in enumerate(parts)]
    return torch.cat([*parts, rest], dim)
