# SPDX-License-Identifier: Apache-2.0
"""Small parts: mesh, options, launchers, safetensors, one-ulp moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isoshard import RecordError, UsageError
from isoshard._launch import recognise
from isoshard._mesh import Mesh, mesh_of, parse_mesh
from isoshard._options import Options
from isoshard._perturb import move_by_one_ulp
from isoshard._recorder import Recorder
from isoshard._safetensors import dtype_name, read_safetensors, write_safetensors


def test_a_mesh_counts_from_slow_to_fast() -> None:
    mesh = parse_mesh("dp=2,tp=3")

    assert mesh.coordinates(4) == {"dp": 1, "tp": 1}
    assert mesh.line(4, "tp") == [3, 4, 5]
    assert mesh.line(4, "dp") == [1, 4]


@pytest.mark.parametrize(
    "text", ["dp", "dp=", "dp=two", "dp=2,dp=2", "up=2", "dp=0", "dp=2,dp_shard=2"]
)
def test_a_wrong_mesh_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must"):
        parse_mesh(text)


def test_a_mesh_must_have_as_many_ranks_as_there_are() -> None:
    assert mesh_of({"data": 2, "model": 2}, 4).axes == {"dp": 2, "tp": 2}
    with pytest.raises(UsageError, match="dp=2,tp=2 .4. for 6 ranks"):
        mesh_of({"dp": 2, "tp": 2}, 6)


def test_both_halves_of_a_dp_axis_split_samples() -> None:
    assert Mesh({"dp_replicate": 2, "dp_shard": 3, "tp": 2}).data_degree == 6


@pytest.mark.parametrize("layout", [{"tp": -1}, {"tp": True}, {"up": 0}, {"tp": "max"}, "copy"])
def test_a_wrong_layout_is_refused(layout: object) -> None:
    with pytest.raises(UsageError, match="must"):
        Options(layouts={"param/*": layout})  # type: ignore[dict-item]


def test_a_number_of_the_optimizer_has_no_dim_that_a_layout_cuts(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a", options=Options(layouts={"*/w*": {"tp": 0}}))
    recorder.world_size, recorder.mesh = 2, Mesh({"tp": 2})

    recorder.put("optimizer", "w.step", torch.ones(1), layout="replicate")
    recorder.put("optimizer", "w.exp_avg", torch.ones(3))

    shapes = [entry.record["global_shape"] for entry in recorder._entries]
    assert shapes == [[1], [6]]


def test_patterns_are_kind_and_name() -> None:
    options = Options(
        layouts={"grad/*.bias": "replicate", "w": {"tp": 0}}, not_recorded={"mask/*": "-"}
    )

    assert options.layout("grad", "up.bias") == "replicate"
    assert options.layout("param", "up.bias") is None
    assert options.layout("optimizer", "w") == {"tp": 0}
    assert options.is_left_out("mask", "x")
    with pytest.raises(UsageError, match="KIND/NAME"):
        Options(not_recorded={"weights/*": "-"})


def test_names_are_changed_by_a_mapping_or_a_function() -> None:
    assert Options(rename={"a": "b"}).name("a") == "b"
    assert Options(rename={"a": "b"}).name("c") == "c"
    with pytest.raises(UsageError, match="rename must return a name"):
        Options(rename=lambda _: "").name("a")


def test_safetensors_come_back(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(2).bfloat16(),
        "none": torch.empty(0, 5),
        "ids": torch.arange(6).reshape(2, 3),
        "yes": torch.tensor([True, False]),
    }

    write_safetensors(tmp_path / "x", list(tensors.items()))
    back = read_safetensors(tmp_path / "x")

    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    data = (tmp_path / "x").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["b"] == {"dtype": "BF16", "shape": [2], "data_offsets": [48, 52]}


def test_a_dtype_that_bundles_lack_is_refused_by_name() -> None:
    with pytest.raises(RecordError, match="complex64"):
        dtype_name(torch.complex64, "x")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_moves_by_one_ulp(dtype: torch.dtype) -> None:
    before = torch.tensor([1.0, -1.0, 0.3, 1000.0] * 50).to(dtype)
    after = before.clone()

    move_by_one_ulp(after, torch.Generator().manual_seed(1))

    assert bool((after != before).all())
    relative = ((after.double() - before.double()) / before.double()).abs()
    assert float(relative.max()) <= torch.finfo(dtype).eps
    assert bool((after > before).any()) and bool((after < before).any())


def own(name: str) -> str:
    import sys

    return str(Path(sys.executable).parent / name)


def test_launchers_are_recognised() -> None:
    words = [own("torchrun"), "--standalone", "--nproc-per-node=4", "--master-port", "1", "t.py"]
    launch = recognise([*words, "--steps", "2"])

    assert launch is not None
    assert (launch.world_size, launch.script, launch.arguments) == (4, "t.py", ["--steps", "2"])
    by_module = recognise(
        [own("python"), "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "a.b"]
    )
    assert by_module is not None
    assert by_module.is_module and by_module.script == "a.b"
    assert launch.single().world_size == 1


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "t.py"],
        ["torchrun", "--nproc-per-node", "gpu", "t.py"],
        ["torchrun", "--nproc-per-node", "2"],
        ["torchrun", "--no-python", "--nproc-per-node", "2", "t"],
        ["python", "t.py"],
        ["mpirun", "-n", "2", "python", "t.py"],
        ["/somewhere/else/torchrun", "--nproc-per-node", "2", "t.py"],
    ],
)
def test_other_commands_stay_untouched(words: list[str]) -> None:
    if not words[0].startswith("/"):
        words = [own(words[0]), *words[1:]]
    assert recognise(words) is None
