# SPDX-License-Identifier: Apache-2.0
"""The mesh of a run: which axis is how large, and where a rank is in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import UsageError

AXES = ("dp", "tp", "pp", "cp", "ep", "dp_replicate", "dp_shard")
#: Axes over which samples are split.
DATA_AXES = ("dp", "dp_replicate", "dp_shard")
#: Names that frameworks give to these axes.
ALIASES = {
    "data": "dp",
    "data_parallel": "dp",
    "fsdp": "dp",
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "model": "tp",
    "tensor": "tp",
    "mp": "tp",
    "pipe": "pp",
    "pipeline": "pp",
    "context": "cp",
    "expert": "ep",
}

MeshLike = Any  # str, a mapping of axis -> degree, a torch DeviceMesh, or None


class Mesh:
    """Axes from the slowest to the fastest: ranks 0 and 1 differ in the last one."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self.axes: dict[str, int] = {}
        for name, degree in axes.items():
            axis = ALIASES.get(name, name)
            if axis not in AXES:
                raise UsageError(f"An axis of a mesh must be one of {', '.join(AXES)}, got {name}.")
            if axis in self.axes:
                raise UsageError(f"An axis of a mesh must be named once, got {axis} twice.")
            if degree < 1:
                raise UsageError(f"The degree of {axis} must be 1 or more, got {degree}.")
            self.axes[axis] = int(degree)
        if "dp" in self.axes and ("dp_replicate" in self.axes or "dp_shard" in self.axes):
            raise UsageError("A mesh must have either dp or its halves dp_replicate and dp_shard.")

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return math.prod(self.axes.values())

    @property
    def data_degree(self) -> int:
        """Over how many ranks the samples are split."""
        return math.prod(n for axis, n in self.axes.items() if axis in DATA_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is on each axis."""
        found: dict[str, int] = {}
        for axis, degree in reversed(self.axes.items()):
            found[axis] = rank % degree
            rank //= degree
        return {axis: found[axis] for axis in self.axes}

    def line(self, rank: int, axis: str) -> list[int]:
        """The ranks that differ from this one on `axis` only, in order."""
        stride = 1
        for other, degree in reversed(self.axes.items()):
            if other == axis:
                first = rank - self.coordinates(rank)[axis] * stride
                return [first + i * stride for i in range(degree)]
            stride *= degree
        raise UsageError(f"The mesh {self} has no axis {axis}.")

    def share(self, rank: int) -> tuple[int, ...]:
        """Coordinates on the axes over which samples are split: which share a rank has."""
        return tuple(c for axis, c in self.coordinates(rank).items() if axis in DATA_AXES)

    @staticmethod
    def from_json(axes: Iterable[Mapping[str, Any]]) -> Mesh:
        """The mesh that `to_json` wrote."""
        return Mesh({str(a["axis"]): int(a["degree"]) for a in axes})

    def to_json(self) -> list[dict[str, object]]:
        """As manifest.json has it."""
        return [{"axis": axis, "degree": degree} for axis, degree in self.axes.items()]

    def __str__(self) -> str:
        return ",".join(f"{axis}={degree}" for axis, degree in self.axes.items())


def mesh_of(value: MeshLike, world_size: int) -> Mesh:
    """A mesh from what a user may give; None is data parallelism over all ranks."""
    if isinstance(value, Mesh):
        mesh = value
    elif value is None:
        mesh = Mesh({"dp": world_size})
    elif isinstance(value, str):
        mesh = parse_mesh(value)
    elif isinstance(value, Mapping):
        mesh = Mesh(value)
    elif hasattr(value, "mesh_dim_names"):
        names = value.mesh_dim_names
        if names is None:
            raise UsageError(
                "A DeviceMesh must have names for its dims: "
                'init_device_mesh(..., mesh_dim_names=("dp", "tp")).'
            )
        mesh = Mesh({name: value.size(i) for i, name in enumerate(names)})
    else:
        raise UsageError(
            'A mesh must be a text such as "dp=2,tp=2", a mapping, a DeviceMesh or None, '
            f"got {value!r}."
        )
    if world_size == 1:
        return Mesh(dict.fromkeys(mesh.axes, 1))
    if mesh.size != world_size:
        raise UsageError(
            f"The product of the mesh's degrees must be the number of ranks, "
            f"got {mesh} ({mesh.size}) for {world_size} ranks."
        )
    return mesh


def parse_mesh(text: str) -> Mesh:
    """A mesh from a text such as dp=2,tp=2."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, degree = part.partition("=")
        if not equals or not degree.strip().isdigit() or name.strip() in axes:
            raise UsageError(f"A mesh must look like dp=2,tp=2, got {text!r}.")
        axes[name.strip()] = int(degree)
    return Mesh(axes)
