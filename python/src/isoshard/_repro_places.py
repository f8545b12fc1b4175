# SPDX-License-Identifier: Apache-2.0
"""Where the parts of one recorded tensor lie in the whole, as a script of its own can use it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._mesh import Mesh

#: local offset, global offset, size
Box = tuple[list[int], list[int], list[int]]


class Unplaced(Exception):
    """The bundle does not say where the parts of a tensor lie."""


@dataclass(frozen=True)
class Places:
    """The boxes of each rank that holds something, and which ranks make up each copy."""

    shape: list[int]  #: of the whole tensor; one number where its flattened elements are cut
    boxes: dict[int, list[Box]]
    copies: list[list[int]]  #: the parts of the ranks of a copy add up to the whole tensor
    weight: float = 1.0  #: of each part: 1/n where the tensor is the mean of n parts

    def narrowed(self) -> tuple[int, list[int], list[int]] | None:
        """One dim, and begin and size of each rank's part along it; None if that is not all."""
        dims = {d for boxes in self.boxes.values() for d in _cut_dims(boxes, self.shape)}
        if len(dims) > 1 or any(len(boxes) > 1 for boxes in self.boxes.values()):
            return None
        dim = dims.pop() if dims else 0
        begins, sizes = [], []
        for rank in range(max(self.boxes) + 1):
            boxes = self.boxes.get(rank, [])
            if boxes and any(boxes[0][0]):
                return None
            begins.append(boxes[0][1][dim] if boxes else 0)
            sizes.append(boxes[0][2][dim] if boxes else 0)
        return dim, begins, sizes

    def assemble(self, parts: Mapping[int, torch.Tensor], copy: Sequence[int]) -> torch.Tensor:
        """The whole tensor as the ranks of a copy have it, in fp64."""
        whole = torch.zeros(self.shape, dtype=torch.float64)
        is_simple = self.narrowed() is not None
        for rank in copy:
            for local, begin, size in self.boxes[rank]:
                at = whole[_slices(begin, size)]
                own = parts[rank].double()
                at += self.weight * (
                    own.reshape(at.shape) if is_simple else own[_slices(local, size)]
                )
        return whole


def _cut_dims(boxes: Sequence[Box], shape: Sequence[int]) -> list[int]:
    return [d for box in boxes for d, n in enumerate(shape) if box[2][d] != n or box[1][d]]


def _slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


def places_of(records: Mapping[int, Mapping[str, Any]], mesh: Mesh) -> Places:
    """From the records that the ranks of a run have of one tensor; raises Unplaced."""
    first = next(iter(records.values()))
    if any("global_shape" not in record for record in records.values()):
        raise Unplaced("the run does not say where the ranks' parts of this tensor lie")
    is_flat = any("flat" in record for record in records.values())
    shape = list(first["global_shape"]) or [1]
    boxes = {rank: _boxes_of(record, rank, mesh) for rank, record in records.items()}
    boxes = {rank: own for rank, own in boxes.items() if own}
    added = {
        p["axis"]: p["reduction"] for p in first.get("placements", []) if p["kind"] == "partial"
    }
    if not set(added.values()) <= {"sum", "avg"}:
        raise Unplaced("this tensor is a maximum over ranks")
    means = [mesh.axes[axis] for axis, reduction in added.items() if reduction == "avg"]
    whole = [math.prod(shape)] if is_flat else shape
    return Places(whole, boxes, _copies(boxes, list(added), mesh), 1.0 / math.prod(means))


def _copies(boxes: Mapping[int, list[Box]], added: Sequence[str], mesh: Mesh) -> list[list[int]]:
    """Ranks with the same part of the same summand belong to different copies."""
    held: dict[str, list[int]] = {}
    for rank in sorted(boxes):
        at = mesh.coordinates(rank)
        part = str(([box[1:] for box in boxes[rank]], [at[axis] for axis in added]))
        held.setdefault(part, []).append(rank)
    number = max(len(ranks) for ranks in held.values())
    copies = [sorted(ranks[i % len(ranks)] for ranks in held.values()) for i in range(number)]
    return sorted(copies)


def _boxes_of(record: Mapping[str, Any], rank: int, mesh: Mesh) -> list[Box]:
    """The record's boxes or flat parts, or what its placements say."""
    if "boxes" in record:
        return [(b["local_offset"], b["global_offset"], b["size"]) for b in record["boxes"]]
    if "flat" in record:
        return [([f["local_begin"]], [f["global_begin"]], [f["count"]]) for f in record["flat"]]
    shape = list(record["global_shape"]) or [1]
    offset, size = [0] * len(shape), list(shape)
    at = mesh.coordinates(rank)
    placements = record.get("placements", [])
    for axis in mesh.axes:  # the slower one cuts first
        for placement in placements:
            if placement["axis"] != axis:
                continue
            if placement["kind"] == "shard":
                dim = placement["dim"]
                size[dim] //= mesh.axes[axis]
                offset[dim] += at[axis] * size[dim]
            elif placement["kind"] == "only_at":
                if at[axis] not in (placement["coordinate"], *placement.get("also_at", [])):
                    return []
    return [([0] * len(shape), offset, size)] if math.prod(size) else []
