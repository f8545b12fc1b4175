# SPDX-License-Identifier: Apache-2.0
"""Places of local tensors: each rule with a counterpart that must not be read so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from isoshard import RecordError
from isoshard._dtensor import axes_of_mesh_dims, place_of
from isoshard._mesh import Mesh
from isoshard._places import offsets_of
from isoshard._samples import runs_of

MESH = Mesh({"dp": 2, "tp": 2})


class FakeMesh:
    """A DeviceMesh as seen from one rank, without a process group."""

    def __init__(self, degrees: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
        self.degrees, self.coordinate = degrees, coordinate
        self.ndim = len(degrees)
        self.mesh = torch.arange(int(torch.tensor(degrees).prod())).reshape(degrees)
        self.mesh_dim_names = None

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate

    def size(self, dim: int) -> int:
        return self.degrees[dim]


def dtensor(shape: list[int], placements: list[Any], mesh: FakeMesh, local: list[int]) -> Any:
    held = torch.zeros(local)
    return SimpleNamespace(
        shape=torch.Size(shape),
        ndim=len(shape),
        placements=placements,
        device_mesh=mesh,
        to_local=lambda: held,
    )


def test_uneven_shards_are_cut_as_torch_chunk_does() -> None:
    begins = []
    for rank, rows in enumerate([3, 3, 1]):
        mesh = FakeMesh((3,), (rank,))
        place = place_of(dtensor([7, 4], [Shard(0)], mesh, [rows, 4]), "w")
        begins.append(place.boxes[0]["global_offset"][0])
    assert begins == [0, 3, 6]


def test_a_rank_beyond_the_end_holds_no_box() -> None:
    place = place_of(dtensor([2, 4], [Shard(0)], FakeMesh((3,), (2,)), [0, 4]), "w")
    assert place.boxes == []


def test_a_local_size_that_the_placements_do_not_give_is_refused() -> None:
    with pytest.raises(RecordError, match="must hold .3, 4. here, got .2, 4."):
        place_of(dtensor([7, 4], [Shard(0)], FakeMesh((3,), (0,)), [2, 4]), "w")


def test_plain_shards_of_one_dim_nest_in_mesh_order() -> None:
    place = place_of(dtensor([8], [Shard(0), Shard(0)], FakeMesh((2, 2), (1, 0)), [2]), "w")
    assert place.boxes[0]["global_offset"] == [4]


def test_a_strided_shard_cuts_behind_the_plain_one() -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    place = place_of(dtensor([8], placements, FakeMesh((2, 2), (1, 0)), [2]), "w")
    assert place.boxes[0]["global_offset"] == [2]  # tp 0 holds 0..3, of these dp 1 the second half


def test_packed_parts_are_several_boxes() -> None:
    placements = [_StridedShard(0, split_factor=2)]
    place = place_of(dtensor([8], placements, FakeMesh((2,), (1,)), [4]), "gate_up")
    assert [b["global_offset"] for b in place.boxes] == [[2], [6]]
    assert [b["local_offset"] for b in place.boxes] == [[0], [2]]


def test_partial_sums_are_named_and_other_reductions_refused() -> None:
    mesh = FakeMesh((2,), (0,))
    assert place_of(dtensor([8], [Partial()], mesh, [8]), "x").partial == [(0, "sum")]
    with pytest.raises(RecordError, match="sum or avg, got max"):
        place_of(dtensor([8], [Partial("max")], mesh, [8]), "x")


def test_ranks_say_which_axes_a_device_mesh_has() -> None:
    assert axes_of_mesh_dims(FakeMesh((2, 2), (1, 0)), MESH, 2) == [["dp"], ["tp"]]
    assert axes_of_mesh_dims(FakeMesh((4,), (2,)), MESH, 2) == [["dp", "tp"]]
    with pytest.raises(RecordError, match="must be axes of the mesh dp=4"):
        axes_of_mesh_dims(FakeMesh((2, 2), (1, 0)), Mesh({"dp": 4}), 2)


def test_replicas_hold_the_whole() -> None:
    place = place_of(dtensor([8], [Replicate()], FakeMesh((2,), (1,)), [8]), "w")
    assert place.boxes[0]["size"] == [8]


@pytest.mark.parametrize(
    ("kind", "local", "whole", "begins"),
    [
        ("activation", [2, 6, 8], [4, 6, 8], [[0, 0, 0], [0, 0, 0], [2, 0, 0], [2, 0, 0]]),
        ("activation", [2, 6, 4], [4, 6, 8], [[0, 0, 0], [0, 0, 4], [2, 0, 0], [2, 0, 4]]),
        ("activation", [2, 3, 8], [4, 6, 8], [[0, 0, 0], [0, 3, 0], [2, 0, 0], [2, 3, 0]]),
        ("param", [4, 8], [8, 8], [[0, 0], [4, 0], [0, 0], [4, 0]]),
        ("grad", [8, 4], [8, 8], [[0, 0], [0, 4], [0, 0], [0, 4]]),
        ("param", [8, 8], [8, 8], [[0, 0]] * 4),
        ("param", [2, 8], [8, 8], [[0, 0], [2, 0], [4, 0], [6, 0]]),
    ],
)
def test_conventions_say_where_plain_tensors_lie(
    kind: str, local: list[int], whole: list[int], begins: list[list[int]]
) -> None:
    assert offsets_of([local] * 4, whole, MESH, kind) == begins


def test_uneven_parts_add_up_along_one_axis() -> None:
    shapes = [[5, 8], [5, 8], [3, 8], [3, 8]]
    assert offsets_of(shapes, [8, 8], MESH, "activation") == [[0, 0], [0, 0], [5, 0], [5, 0]]


@pytest.mark.parametrize("local", [[3, 8], [8, 5], [9, 8]])
def test_shapes_that_no_axis_cuts_stay_open(local: list[int]) -> None:
    assert offsets_of([local] * 4, [8, 8], MESH, "param") is None


def test_runs_of_samples_are_joined() -> None:
    assert runs_of([0, 2], 1) == [(0, 0, 1), (1, 2, 1)]
    assert runs_of([4, 5], 3) == [(0, 12, 6)]
