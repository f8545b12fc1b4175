# SPDX-License-Identifier: Apache-2.0
"""Moves every weight by one ulp, up or down at random."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping

import torch

from ._dtensor import is_dtensor, local_of
from ._names import named_parameters, reshard
from .errors import RecordError


def perturb(
    model: torch.nn.Module,
    seed: int,
    outside: Mapping[str, torch.Tensor] | None = None,
    tables: Collection[str] = (),
    *,
    on_ranks: bool = False,
) -> None:
    """Moves each floating-point or complex parameter by one ulp of its dtype, in place; so those
    outside.

    Where FSDP2 or autocast computes in 16 bits, it is an ulp of those: a smaller one would be lost
    in the cast. `tables` are parameters that stay as they are (_frozen_tables).

    A parameter that a DTensor cuts over several ranks is refused, because perturbed runs are runs
    of one process. `on_ranks`: they are runs on the ranks of their reference, so each rank moves
    what it has of a parameter; ranks with the same part move it alike.
    """
    reshard(model)
    generator = torch.Generator().manual_seed(seed)
    computed = _compute_dtypes(model)
    with torch.no_grad():
        for name, parameter in [*named_parameters(model), *(outside or {}).items()]:
            if not parameter.is_floating_point() and not parameter.is_complex():
                continue
            if name in tables:
                continue
            if on_ranks:  # whatever parts of other parameters this rank has
                generator = torch.Generator().manual_seed(_seed_of(seed, name))
            elif is_dtensor(parameter) and local_of(parameter).shape != parameter.shape:
                raise RecordError(
                    f"A perturbed run must hold whole parameters, got {name} cut over ranks. "
                    "Give a reference command that runs one process."
                )
            local = local_of(parameter.detach())
            if local.is_complex():
                move_by_one_ulp(torch.view_as_real(local), generator)
                continue
            coarse = computed.get(id(parameter), local.dtype)
            if torch.finfo(coarse).eps > torch.finfo(local.dtype).eps:
                _move_by_one_coarse_ulp(local, coarse, generator)
            else:
                move_by_one_ulp(local, generator)


def _seed_of(seed: int, name: str) -> int:
    return seed * 1_000_003 + zlib.crc32(name.encode())


def _compute_dtypes(model: torch.nn.Module) -> dict[int, torch.dtype]:
    """What parameters are cast to for the forward pass, by their ids, where it is known."""
    found: dict[int, torch.dtype] = {}
    if torch.is_autocast_enabled("cpu"):
        found = dict.fromkeys(map(id, model.parameters()), torch.get_autocast_dtype("cpu"))
    for module in model.modules():  # outer ones first: the innermost policy counts
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        dtype = getattr(getattr(state, "_mp_policy", None), "param_dtype", None)
        if dtype is not None:
            found.update(dict.fromkeys(map(id, module.parameters()), dtype))
    return found


def _move_by_one_coarse_ulp(
    tensor: torch.Tensor, coarse: torch.dtype, generator: torch.Generator
) -> None:
    """Adds or subtracts an ulp of a coarser dtype; zeros stay."""
    up = (torch.rand(tensor.shape, generator=generator) < 0.5).to(tensor.device)
    _, exponent = torch.frexp(tensor)  # 0.5 <= mantissa < 1
    ulp = torch.ldexp(torch.full_like(tensor, torch.finfo(coarse).eps / 2), exponent)
    tensor.add_(torch.where(tensor == 0, torch.zeros_like(ulp), torch.where(up, ulp, -ulp)))


def move_by_one_ulp(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Replaces each element by one of its two neighbours; zeros of 16-bit tensors stay."""
    up = (torch.rand(tensor.shape, generator=generator) < 0.5).to(tensor.device)
    if tensor.dtype in (torch.float32, torch.float64):
        large = torch.full_like(tensor, math.inf)
        tensor.copy_(
            torch.where(up, torch.nextafter(tensor, large), torch.nextafter(tensor, -large))
        )
        return
    bits = tensor.contiguous().view(torch.int16).to(torch.int32)
    moved = (bits + torch.where(up, 1, -1)).to(torch.int16).view(tensor.dtype)
    tensor.copy_(torch.where(tensor == 0, tensor, moved))
