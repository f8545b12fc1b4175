# SPDX-License-Identifier: Apache-2.0
"""Where the local part of a DTensor lies in the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ._calls import not_journaled
from ._mesh import Mesh
from .errors import RecordError

Box = dict[str, list[int]]


@dataclass
class Place:
    """Boxes of a local tensor, and the mesh dims over which it is a partial sum."""

    global_shape: list[int]
    local_shape: list[int]
    boxes: list[Box]
    partial: list[tuple[int, str]]  # (dim of the DeviceMesh, sum or avg)


def is_dtensor(value: object) -> bool:
    """Whether this is a DTensor (asked without importing torch.distributed)."""
    return hasattr(value, "placements") and hasattr(value, "to_local")


def local_of(value: Any) -> torch.Tensor:
    """The local tensor of a DTensor, or of an asynchronous collective."""
    local: Any = value.to_local() if is_dtensor(value) else value
    result: torch.Tensor = local.wait() if hasattr(local, "wait") else local
    return result


@not_journaled
def reduced(value: torch.Tensor) -> torch.Tensor:
    """A DTensor that is still a sum over ranks, added up as each operation on it would do.

    Collective over the DTensor's mesh. Sequence-parallel norms have such gradients. A sparse
    gradient, such as of an embedding, is returned as a dense one.
    """
    if value.layout == torch.sparse_coo:
        return value.to_dense()
    if not is_dtensor(value):
        return value
    from torch.distributed.tensor import Replicate

    whole: Any = value
    if not _is_partial(whole):
        return value
    placements = [Replicate() if p.is_partial() else p for p in whole.placements]
    with torch.no_grad():
        result: torch.Tensor = whole.redistribute(placements=placements)
    return result


def is_set_on_any(flag: bool, values: Iterable[torch.Tensor]) -> bool:
    """Whether a flag is set on any rank with which this one must add these values up.

    Collective over the meshes of DTensors that are still sums, as `reduced` is: ranks that must
    call that together learn whether they do.
    """
    wholes: list[Any] = [value for value in values if is_dtensor(value) and _is_partial(value)]
    if not wholes:
        return flag
    from torch.distributed.tensor import DTensor, Partial, Replicate

    meshes = {(whole.device_mesh, tuple(whole.placements)): whole for whole in wholes}
    for whole in meshes.values():
        number = torch.tensor([float(flag)], device=whole.to_local().device)
        placements = [Partial("max") if p.is_partial() else Replicate() for p in whole.placements]
        own = DTensor.from_local(number, whole.device_mesh, placements, run_check=False)
        flag = bool(local_of(reduced(own)).item())
    return flag


def _is_partial(value: Any) -> bool:
    return any(placement.is_partial() for placement in value.placements)


def place_of(value: Any, what: str) -> Place:
    """Where a DTensor's local part lies.

    Plain shards nest first, in the order of the mesh. A strided shard (FSDP2 over tensor
    parallelism; packed gate and up projections) cuts behind the plain ones; where its split
    factor is more than what those make, it cuts each of so many equal parts: several boxes.
    """
    mesh, coordinate = value.device_mesh, value.device_mesh.get_coordinate()
    if coordinate is None:
        raise RecordError(f"{what} is a DTensor on a mesh that does not have this rank.")
    ndim = max(value.ndim, 1)
    runs: list[list[tuple[int, int]]] = [[(0, n)] for n in value.shape]
    todo = [
        (hasattr(p, "split_factor"), i, p)
        for i, p in enumerate(value.placements)
        if hasattr(p, "dim")
    ]
    for strided, i, p in sorted(todo, key=lambda x: (x[0], -x[1] if x[0] else x[1])):
        d, n = p.dim % ndim, mesh.size(i)
        parts = 1
        if strided:
            made = math.prod(
                mesh.size(j) for s, j, q in todo if not s and j > i and q.dim % ndim == d
            )
            parts = max(1, p.split_factor // made)
        runs[d] = _cut(runs[d], parts, n, coordinate[i])
    local = [sum(size for _, size in run) for run in runs]
    held = list(local_of(value).shape)
    if held != local:
        raise RecordError(
            f"The place of {what} is not known: a DTensor {value.placements} of "
            f"{list(value.shape)} must hold {local} here, got {held}. Say it with layouts=."
        )
    partial = [(i, _reduction(p, what)) for i, p in enumerate(value.placements) if p.is_partial()]
    return Place(list(value.shape), local, _boxes(runs), partial)


def _cut(
    runs: list[tuple[int, int]], parts: int, degree: int, coordinate: int
) -> list[tuple[int, int]]:
    """One rank's piece of each of `parts` equal parts of each run, as torch.chunk cuts."""
    cut = []
    for begin, size in runs:
        piece = size // parts
        for k in range(parts):
            chunk = -(-piece // degree)
            first = min(chunk * coordinate, piece)
            cut.append((begin + k * piece + first, min(chunk, piece - first)))
    return cut


def _boxes(runs: list[list[tuple[int, int]]]) -> list[Box]:
    local_begins = [list(itertools.accumulate([0] + [n for _, n in run[:-1]])) for run in runs]
    boxes = []
    for pick in itertools.product(*[range(len(run)) for run in runs]):
        size = [runs[d][k][1] for d, k in enumerate(pick)]
        if math.prod(size) == 0:
            continue
        boxes.append(
            {
                "local_offset": [local_begins[d][k] for d, k in enumerate(pick)],
                "global_offset": [runs[d][k][0] for d, k in enumerate(pick)],
                "size": size,
            }
        )
    return boxes


def _reduction(placement: Any, what: str) -> str:
    reduction = str(placement.reduce_op)
    if reduction not in ("sum", "avg"):
        raise RecordError(
            f"A partial DTensor must be reduced by sum or avg, got {reduction} for {what}. "
            "Name it in not_recorded=."
        )
    return reduction


def axes_of_mesh_dims(device_mesh: Any, mesh: Mesh, rank: int) -> list[list[str]]:
    """For each dim of a DeviceMesh the axes of the run's mesh along which its ranks differ.

    Ranks decide, not names: the group of this rank along the dim is compared with the lines of
    the mesh. Axes of degree 1 never count.
    """
    coordinate = device_mesh.get_coordinate()
    found: list[list[str]] = []
    for dim in range(device_mesh.ndim):
        index: list[Any] = list(coordinate)
        index[dim] = slice(None)
        group = set(device_mesh.mesh[tuple(index)].tolist())
        axes = [
            axis
            for axis, degree in mesh.axes.items()
            if degree > 1 and set(mesh.line(rank, axis)) <= group
        ]
        size = math.prod(mesh.axes[axis] for axis in axes)
        if size != len(group):
            names = device_mesh.mesh_dim_names
            raise RecordError(
                f"A dim of a DeviceMesh must be axes of the mesh {mesh}, got "
                f"{names[dim] if names else dim} with ranks {sorted(group)}. Give the mesh that "
                "the script uses, from the slowest axis to the fastest (--mesh, mesh=)."
            )
        found.append(axes)
    return found
