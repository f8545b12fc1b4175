# SPDX-License-Identifier: Apache-2.0
"""Places of local tensors: each rule with a counterpart that must not be read so."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from isoshard import RecordError, _bundle
from isoshard._data import Finding, check_samples
from isoshard._dtensor import axes_of_mesh_dims, place_of
from isoshard._mesh import Mesh
from isoshard._places import _added_over, readings_of, resolve, resolved_copy
from isoshard._samples import runs_of
from isoshard.errors import BundleError

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
    assert readings_of([local] * 4, whole, MESH, kind)[0].offsets == begins


def test_uneven_parts_add_up_along_one_axis() -> None:
    shapes = [[5, 8], [5, 8], [3, 8], [3, 8]]
    readings = readings_of(shapes, [8, 8], MESH, "activation")
    assert [r.offsets for r in readings] == [[[0, 0], [0, 0], [5, 0], [5, 0]]]


@pytest.mark.parametrize("local", [[3, 8], [8, 5], [9, 8]])
def test_shapes_that_no_axis_cuts_stay_open(local: list[int]) -> None:
    assert readings_of([local] * 4, [8, 8], MESH, "param") == []


@pytest.mark.parametrize(("local", "axes"), [([1, 3, 2], ("dp",)), ([2, 3, 2], ())])
def test_a_gradient_that_samples_do_not_cut_may_be_a_sum_over_them(
    local: list[int], axes: tuple[str, ...]
) -> None:
    whole = [4, 3, 2] if local[0] == 2 else local
    readings = readings_of([local] * 4, whole, MESH, "activation_grad")

    assert _added_over(readings[0], MESH) == axes


def test_runs_of_samples_are_joined() -> None:
    assert runs_of([0, 2], 1) == [(0, 0, 1), (1, 2, 1)]
    assert runs_of([4, 5], 3) == [(0, 12, 6)]


def write(path: Path, mesh: Mesh, ranks: list[dict[str, torch.Tensor]], infer: bool) -> Path:
    """A bundle of one step; tensors are named KIND/NAME."""
    _bundle.prepare_folder(path, path.name)
    for rank, tensors in enumerate(ranks):
        entries = []
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            record: dict[str, Any] = {"kind": kind, "name": name, "call": 0}
            record["local_shape"] = list(tensor.shape)
            record.update({"layout": "infer"} if infer else {"global_shape": list(tensor.shape)})
            entries.append(_bundle.Entry(record, tensor.contiguous()))
        _bundle.write_rank(path, path.name, rank, 0, entries)
    manifest = {"schema": 2, "run": path.name, "mesh": mesh.to_json(), "steps": [0]}
    _bundle.seal(path, manifest)
    return path


def boxes(path: Path, rank: int) -> list[dict[str, list[int]]]:
    record = _bundle.read_records(path, 0, rank)["records"][0]
    return [] if "boxes" not in record else list(record["boxes"])


def bundles(tmp_path: Path, parts: list[torch.Tensor], whole: torch.Tensor) -> tuple[Path, Path]:
    key = "activation/up"
    reference = write(tmp_path / "reference", Mesh({"dp": 1}), [{key: whole}], False)
    return reference, write(tmp_path / "run", MESH, [{key: part} for part in parts], True)


@pytest.mark.parametrize("first", [0.5, -torch.inf, torch.nan])
def test_values_decide_where_several_axes_fit(tmp_path: Path, first: float) -> None:
    whole = torch.randn(3, 4, 5)  # time, samples, features: conventions would cut dim 1 over tp
    whole[:, :, 0] = first
    low, high = whole.chunk(2, dim=1)
    reference, run = bundles(tmp_path, [low, low, high, high], whole)
    assert resolve(reference, run) == 1
    begins = [boxes(run, rank)[0]["global_offset"] for rank in range(4)]
    assert begins == [[0, 0, 0], [0, 0, 0], [0, 2, 0], [0, 2, 0]]
    assert _bundle.reseal_is_safe(run)


def test_conventions_decide_where_values_do_not(tmp_path: Path) -> None:
    whole = torch.randn(3, 4, 5)
    noise = torch.randn(3, 2, 5)
    reference, run = bundles(tmp_path, [noise] * 4, whole)
    assert resolve(reference, run) == 1
    begins = [boxes(run, rank)[0]["global_offset"] for rank in range(4)]
    assert begins == [[0, 0, 0], [0, 2, 0], [0, 0, 0], [0, 2, 0]]


def test_a_bundle_with_nothing_to_resolve_is_judged_itself(tmp_path: Path) -> None:
    whole = torch.randn(3, 4, 5)
    reference, run = bundles(tmp_path, [whole[:, :3]] * 4, whole)
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    assert resolved_copy(reference, run, tmp_path / "copy") == run
    assert resolve(reference, run) == 0
    assert before == {p: p.stat().st_mtime_ns for p in run.rglob("*")}


@pytest.mark.parametrize("name", ["../thesis.txt", "/etc/passwd", "a//b", "step0000/../x"])
def test_files_outside_of_the_bundle_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BundleError, match="must be a path below the folder"):
        _bundle.files_of({"files": {name: "00"}}, tmp_path)


def test_an_unlisted_file_stays_one(tmp_path: Path) -> None:
    whole = torch.randn(3, 4, 5)
    reference, run = bundles(tmp_path, [whole] * 4, whole)
    assert _bundle.reseal_is_safe(run)
    (run / "step0000" / "rank00009.json").write_text("{}")
    assert not _bundle.reseal_is_safe(run)


def test_what_records_may_leave_out_comes_from_the_tensors(tmp_path: Path) -> None:
    whole = torch.randn(3, 4, 5)
    low, high = whole.chunk(2, dim=1)
    reference, run = bundles(tmp_path, [low, low, high, high], whole)
    for path, ranks in ((reference, 1), (run, 4)):
        for rank in range(ranks):
            content = _bundle.read_records(path, 0, rank)
            for record in content["records"]:
                for key in ("call", "dtype", "local_shape"):
                    del record[key]
            _bundle.write_records(path, 0, rank, content)
        _bundle.reseal(path)
    assert resolve(reference, run) == 1


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"records": 1}', '{"records": [{"kind": "param"}]}', '{"records": [3]}']
)
def test_a_malformed_file_is_an_error_of_the_bundle(tmp_path: Path, text: str) -> None:
    whole = torch.randn(3, 4, 5)
    reference, run = bundles(tmp_path, [whole] * 4, whole)
    (run / "step0000" / "rank00001.json").write_text(text)
    with pytest.raises(BundleError, match="must"):
        resolve(reference, run)


def test_a_reference_of_several_ranks_leaves_the_convention(tmp_path: Path) -> None:
    whole = torch.randn(4, 4, 5)
    low, high = whole.chunk(2)
    key = "activation/up"
    two = Mesh({"dp": 2})
    reference = write(tmp_path / "reference", two, [{key: low}, {key: high}], False)
    for rank in range(2):
        content = _bundle.read_records(reference, 0, rank)
        content["records"][0]["global_shape"] = [4, 4, 5]
        _bundle.write_records(reference, 0, rank, content)
    _bundle.reseal(reference)
    parts = [{key: part} for part in (low, low, high, high)]
    run = write(tmp_path / "run", MESH, parts, True)
    assert resolve(reference, run) == 1
    assert [boxes(run, rank)[0]["global_offset"][0] for rank in range(4)] == [0, 0, 2, 2]
    assert check_samples(reference, run) == []


IDS = torch.arange(12).reshape(4, 3)


def inputs(
    tmp_path: Path, ranks: list[dict[str, torch.Tensor]], **more: torch.Tensor
) -> list[Finding]:
    wanted = {"data_id/ids": IDS, **{f"data_id/{k}": v for k, v in more.items()}}
    reference = write(tmp_path / "reference", Mesh({"dp": 1}), [wanted], False)
    return check_samples(reference, write(tmp_path / "run", Mesh({"dp": 2}), ranks, True))


def test_inputs_that_the_ranks_share_out_are_right(tmp_path: Path) -> None:
    low, high = [{"data_id/ids": part, "data_id/at": IDS[:1]} for part in IDS.chunk(2)]
    assert inputs(tmp_path, [low, high], at=IDS[:1]) == []


@pytest.mark.parametrize("ranks", [(4, 4), (2, 4), (4, 2)])
def test_a_rank_with_the_whole_batch_is_named(tmp_path: Path, ranks: tuple[int, int]) -> None:
    (finding,) = inputs(tmp_path, [{"data_id/ids": IDS[:count]} for count in ranks])
    assert (finding.step, finding.name) == (0, "ids")
    assert finding.ranks == [rank for rank, count in enumerate(ranks) if count == 4]
    assert finding.samples is None


def test_time_major_inputs_are_shared_out_along_dim_1(tmp_path: Path) -> None:
    parts = [{"data_id/ids": part} for part in IDS.split([2, 1], dim=1)]
    assert inputs(tmp_path, parts) == []


def test_labels_that_are_not_cut_are_named(tmp_path: Path) -> None:
    parts = [{"data_id/ids": part, "data_id/labels": IDS} for part in IDS.chunk(2)]
    (finding,) = inputs(tmp_path, parts, labels=IDS)
    assert (finding.name, finding.ranks) == ("labels", [0, 1])


def test_a_batch_of_its_own_on_every_rank_is_told_from_a_whole_one(tmp_path: Path) -> None:
    (finding,) = inputs(tmp_path, [{"data_id/ids": IDS}, {"data_id/ids": IDS + 100}])
    assert (finding.samples, finding.ranks) == (4, [0, 1])


def test_one_rank_with_a_batch_of_its_own_is_no_such_script(tmp_path: Path) -> None:
    (finding,) = inputs(tmp_path, [{"data_id/ids": IDS + 100}, {"data_id/ids": IDS[:2]}])
    assert (finding.samples, finding.ranks) == (None, [0])


def test_compare_finds_a_batch_that_is_not_shared_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from isoshard import _program
    from isoshard.cli import main

    given: list[Any] = []

    def call(words: list[str], capture: bool) -> tuple[int, str]:
        given.append(json.loads(Path(words[words.index("--findings") + 1]).read_text()))
        return 1, ""

    monkeypatch.setattr(_program, "call", call)
    inputs(tmp_path, [{"data_id/ids": IDS}] * 2)
    bundles = [str(tmp_path / "reference"), str(tmp_path / "run")]
    for words in (bundles, ["--verbose", *bundles], [*bundles, "--output-dir", str(tmp_path)]):
        assert main(["compare", *words]) == 1
    for content in given:
        (finding,) = content["findings"]
        assert (finding["kind"], finding["name"], finding["ranks"]) == ("data_id", "ids", [0, 1])
    assert len(given) == 3
