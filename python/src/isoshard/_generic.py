# SPDX-License-Identifier: Apache-2.0
"""Moves every weight at random, so that no norm weight is 1 and no bias 0.

A bias of zeros, a norm of ones and a LoRA matrix of zeros hide what goes wrong with them: a bias
that each rank adds, a norm that is left out. An element's move depends on its parameter's name and
on its place in the whole parameter alone, so that all layouts make the same one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import _safetensors
from ._dtensor import Box, is_dtensor, local_of, place_of
from ._mesh import ALIASES, Mesh, MeshLike, mesh_of
from ._names import named_parameters, reshard, unwrapped
from ._options import Layout, Options
from ._presets import with_preset
from ._recorder import world
from .errors import RecordError

#: Standard deviation of a move: of a nonzero element by its own size, of a zero as it is.
_STD = 0.1
_ELEMENTS_AT_ONCE = 1 << 20

#: Global shapes by name, as the reference has them.
Shapes = Mapping[str, Sequence[int]]


def move_recorded(
    module: torch.nn.Module,
    *,
    has_copies: bool,
    options: Options,
    mesh: MeshLike,
    shapes: Shapes | None = None,
) -> None:
    """Moves the weights of a module that is about to be recorded on this rank.

    `has_copies`: whether its optimizer holds copies of weights. Ranks: local with the reference's
    `shapes`; without them collective, and what ranks hold different values of must have a layout.
    Raises RecordError where weights cannot be moved alike.
    """
    if has_copies:
        raise RecordError(
            "--generic-weights (generic_weights=True) must move the only copy of each weight, got "
            f"{type(module).__name__}, whose optimizer has others. Leave it out."
        )
    rank, size = world()
    model, options = unwrapped(module), with_preset(options, module)
    if size == 1:
        shapes = None
    elif shapes is None and dist.is_initialized():
        _require_known_places(model, options, rank, size)
    move_generically(model, options=options, mesh=mesh_of(mesh, size), rank=rank, shapes=shapes)


def _require_known_places(model: torch.nn.Module, options: Options, rank: int, size: int) -> None:
    """Raises on all ranks if a plain tensor without a layout is not the same on all ranks."""
    own = {}
    for plain, parameter in named_parameters(model):
        name = options.name(plain)
        if not is_dtensor(parameter) and options.layout("param", name) in (None, "infer"):
            data = _safetensors.bytes_of(parameter.detach().cpu())
            own[name] = (list(parameter.shape), hashlib.sha256(data).digest())
    ranks: list[Any] = [None] * size
    dist.all_gather_object(ranks, own)
    for other, theirs in enumerate(ranks):
        for name, held in theirs.items():
            first = next(r for r, of_rank in enumerate(ranks) if name in of_rank)
            if held != ranks[first][name]:
                if held[0] == ranks[first][name][0]:
                    raise RecordError(
                        f"{name} must be the same on all ranks to move all weights alike, or have "
                        f"a layout, got other values on rank {other} than on rank {first}. Send it "
                        "to all ranks before, give its layout, or leave generic_weights=True out."
                    )
                raise _unknown_place(name, held[0], other, f"and another one on rank {first}")


def _unknown_place(name: str, shape: Sequence[int], rank: int, beside: str) -> RecordError:
    return RecordError(
        f"The place of each parameter must be known to move all weights alike, got {name} with "
        f"shape {list(shape)} on rank {rank}, {beside}. Say which part it is with layouts "
        f'(in --options FILE.py, or layouts=), such as {{"param/{name}": {{"tp": 0}}}}, or leave '
        "--generic-weights (generic_weights=True) out."
    )


def move_generically(
    model: torch.nn.Module,
    *,
    options: Options | None = None,
    mesh: Mesh | None = None,
    rank: int = 0,
    shapes: Shapes | None = None,
) -> None:
    """Moves each floating-point or complex parameter of a model in place.

    Ranks: local. A DTensor says where its part lies; of a plain tensor `options.layouts` may; any
    other one is the whole parameter. Raises RecordError where `shapes` has another shape of it.
    """
    options = options or Options()
    reshard(model)
    with torch.no_grad():
        for own, parameter in named_parameters(model):
            if parameter.is_meta or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            name = options.name(own)
            whole, boxes = _boxes_of(name, parameter, options.layout("param", name), mesh, rank)
            wanted = None if shapes is None else shapes.get(name)
            if wanted is not None and list(wanted) != whole:
                raise _unknown_place(name, parameter.shape, rank, f"a part of {list(wanted)}")
            local = local_of(parameter.detach())
            for box in boxes:
                part = local
                for dim, (begin, size) in enumerate(
                    zip(box["local_offset"], box["size"], strict=True)
                ):
                    part = part.narrow(dim, begin, size)
                _move(part, name, whole, box["global_offset"])


def write_shapes(model: torch.nn.Module, options: Options, file: Path) -> None:
    """Leaves the shapes of a reference's parameters for the ranks of a run."""
    shapes = {options.name(name): list(p.shape) for name, p in named_parameters(model)}
    file.write_text(json.dumps(shapes))


def read_shapes(file: Path) -> dict[str, list[int]]:
    """What write_shapes left."""
    shapes: dict[str, list[int]] = json.loads(file.read_text())
    return shapes


def _boxes_of(
    name: str, parameter: torch.Tensor, layout: Layout | None, mesh: Mesh | None, rank: int
) -> tuple[list[int], list[Box]]:
    """The shape of the whole parameter, and which boxes of it this rank holds."""
    if is_dtensor(parameter):
        place = place_of(parameter, f"param/{name}")
        return place.global_shape, place.boxes
    shape = list(parameter.shape)
    whole, offset = list(shape), [0] * len(shape)
    if mesh is not None and isinstance(layout, Mapping):
        cuts = {ALIASES.get(axis, axis): dim for axis, dim in layout.items()}
        for axis, coordinate in mesh.coordinates(rank).items():
            dim = cuts.get(axis)
            if isinstance(dim, int) and dim < len(shape):
                offset[dim] = offset[dim] * mesh.axes[axis] + coordinate * shape[dim]
                whole[dim] *= mesh.axes[axis]
    return whole, [{"local_offset": [0] * len(shape), "global_offset": offset, "size": shape}]


def _move(part: torch.Tensor, name: str, whole: list[int], offset: list[int]) -> None:
    """Moves a box of a parameter, a few rows at a time."""
    if part.is_complex():
        part, whole, offset = torch.view_as_real(part), [*whole, 2], [*offset, 0]
    if part.ndim == 0:
        part, whole, offset = part.unsqueeze(0), [1], [0]
    if part.numel() == 0:
        return
    digest = hashlib.sha256(name.encode()).digest()
    key = int.from_bytes(digest[:8], "little", signed=True)
    rows = max(1, _ELEMENTS_AT_ONCE * part.shape[0] // part.numel())
    # A matrix of zeros gets what leaves its products as large as their factors.
    inputs = math.prod(whole[1:])
    zero = _STD / math.sqrt(inputs) if len(whole) > 1 else _STD
    for first in range(0, part.shape[0], rows):
        piece = part.narrow(0, first, min(rows, part.shape[0] - first))
        begin = [offset[0] + first, *offset[1:]]
        draws = _uniform(_flat_indices(piece.shape, whole, begin), key) * math.sqrt(3)
        draws = draws.to(piece.device)
        value = piece.double()
        moved = torch.where(value == 0, zero * draws, value * (1 + _STD * draws))
        piece.copy_(moved.to(piece.dtype))


def _flat_indices(size: Sequence[int], whole: list[int], offset: list[int]) -> torch.Tensor:
    """Where each element of a box lies in the flattened whole."""
    result = torch.zeros([1] * len(whole), dtype=torch.int64)
    for dim, (count, begin) in enumerate(zip(size, offset, strict=True)):
        places = torch.arange(begin, begin + count, dtype=torch.int64)
        stride = math.prod(whole[dim + 1 :])
        shape = [-1 if d == dim else 1 for d in range(len(whole))]
        result = result + (places * stride).reshape(shape)
    return result


def _uniform(index: torch.Tensor, key: int) -> torch.Tensor:
    """SplitMix64 of key and index, as numbers of [-1, 1) in fp64."""
    mixed = index * _signed(0x9E3779B97F4A7C15) + key
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 11).double() * 2.0**-52 - 1.0


def _signed(value: int) -> int:
    """The 64 bits of a number as torch.int64 has them."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: torch.Tensor, count: int) -> torch.Tensor:
    """A shift to the right that brings zeros in."""
    return (value >> count) & ((1 << (64 - count)) - 1)
