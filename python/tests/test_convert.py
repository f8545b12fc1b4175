# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several frameworks are the same tensors, and each damage is found by name."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isoshard import cli
from isoshard._convert import convert
from isoshard._safetensors import read_safetensors
from isoshard.errors import CheckpointError, UsageError

WRITER = Path(__file__).with_name("checkpoint_writer.py")
NAMES = {"embed.weight", "block.q.weight", "block.up.weight", "block.up.bias",
         "block.norm.weight", "block.norm.bias", "head.weight"}  # fmt: skip
STATES = {f"{name}.{state}" for name in NAMES for state in ("exp_avg", "exp_avg_sq", "step")}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a kind, written once by two ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def target_of(kind: str) -> Path:
        return folder / (f"{kind}.pt" if kind == "ddp" else kind)

    def of(kind: str) -> Path:
        if not target_of(kind).exists():
            kinds = ["ddp", "dcp"] if kind in ("ddp", "dcp") else [kind]  # one start for both
            words = [word for each in kinds for word in (each, str(target_of(each)))]
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            result = subprocess.run(
                [*command, "--standalone", str(WRITER), *words],
                capture_output=True,
                text=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                timeout=900,
                check=False,
            )
            assert result.returncode == 0, result.stderr[-3000:]
        return target_of(kind)

    return of


def compare(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    capfd.readouterr()
    code = cli.main(["compare", "--verbose", "--checkpoint", *map(str, words)])
    output = capfd.readouterr()
    return code, output.out + output.err


def tensors_of(source: Path, folder: Path, **options: bool) -> dict[str, torch.Tensor]:
    convert(source, folder / "x.safetensors", **options)
    return read_safetensors(folder / "x.safetensors")


def adamw_file(path: Path, groups: int = 1, named: bool = False) -> dict[str, torch.Tensor]:
    """A file with a model and its optimizer; returns the tensors that it must become."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4))
    parameters = list(model.named_parameters() if named else model.parameters())
    size = len(parameters) // groups
    optimizer = torch.optim.AdamW(
        [{"params": parameters[at : at + size]} for at in range(0, len(parameters), size)]
    )
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    expected = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for state, value in optimizer.state[parameter].items():
            expected[f"{name}.{state}"] = value
    return expected


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


# files of torch.save


@pytest.mark.parametrize(("groups", "named"), [(1, False), (1, True), (2, True)])
def test_numbers_of_parameters_become_names(tmp_path: Path, groups: int, named: bool) -> None:
    expected = adamw_file(tmp_path / "x.pt", groups, named)

    assert_equal(tensors_of(tmp_path / "x.pt", tmp_path), expected)


def test_numbers_in_several_groups_are_refused_but_weights_convert(tmp_path: Path) -> None:
    expected = adamw_file(tmp_path / "x.pt", groups=2)

    with pytest.raises(CheckpointError, match="in 2 groups.*--weights"):
        convert(tmp_path / "x.pt", tmp_path / "x.safetensors")
    got = tensors_of(tmp_path / "x.pt", tmp_path, weights_only=True)
    assert set(got) == {name for name in expected if name.count(".") == 1}


def test_names_of_wrappers_go(tmp_path: Path) -> None:
    values = {"module._orig_mod.a": torch.ones(2), "module.b._orig_mod.c": torch.ones(1)}
    torch.save(values, tmp_path / "x.bin")

    assert set(tensors_of(tmp_path / "x.bin", tmp_path)) == {"a", "b.c"}


def test_all_dtypes_and_shapes_come_back(tmp_path: Path) -> None:
    values = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "double": torch.randn(1).double(),
        "empty": torch.empty(0, 4),
        "int64": torch.tensor(7),
        "transposed": torch.randn(2, 3).t(),
    }
    torch.save(values, tmp_path / "x.pt")

    assert_equal(tensors_of(tmp_path / "x.pt", tmp_path), values)


def test_pickled_models_in_several_files_are_joined(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a", "b"):
        torch.save({name: torch.ones(2)}, folder / f"{name}.bin")
    index = '{"weight_map": {"a": "a.bin", "b": "b.bin"}}'
    (folder / "pytorch_model.bin.index.json").write_text(index)

    assert set(tensors_of(folder, tmp_path)) == {"a", "b"}
    (folder / "b.bin").unlink()
    with pytest.raises(CheckpointError, match="b.bin must be a file, got none"):
        convert(folder, tmp_path / "x.safetensors")


class Attack:
    """Runs code if it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.folder),))

    def __init__(self, folder: Path) -> None:
        self.folder = folder


def test_code_is_refused_by_name_and_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    torch.save({"model": {"w": torch.ones(2)}, "extra": Attack(ran)}, tmp_path / "x.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(Attack(ran)))

    for source in ("x.pt", "dcp"):
        with pytest.raises(CheckpointError, match=r"posix\.mkdir.*--trust-pickle"):
            convert(tmp_path / source, tmp_path / "x.safetensors")
    assert not ran.exists()
    assert set(tensors_of(tmp_path / "x.pt", tmp_path, trust_pickle=True)) == {"w"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "x.pt"), (b"PK\x03\x04 not a zip", "x.pt"), (b"\x80\x05.", "x.pt")],
)
def test_broken_files_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.pt").write_bytes(content)

    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "x.pt", tmp_path / "x.safetensors")
    assert cli.main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "x.safetensors")]) == 3
    assert not (tmp_path / "x.safetensors").exists()


def test_sources_and_targets_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    (tmp_path / "folder").mkdir()

    with pytest.raises(UsageError, match=r"\*\.safetensors"):
        convert(tmp_path / "tensor.pt", tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="dictionary of tensors"):
        convert(tmp_path / "tensor.pt", tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="must be a checkpoint of DCP"):
        convert(tmp_path / "folder", tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="must be a file or folder, got none"):
        convert(tmp_path / "gone", tmp_path / "x.safetensors")


# two ranks


def test_a_distributed_checkpoint_holds_what_a_file_holds(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    got = tensors_of(saved("dcp"), tmp_path)

    assert set(got) == NAMES | STATES
    assert_equal(got, tensors_of(saved("ddp"), tmp_path))


@pytest.mark.usefixtures("judge_program")
def test_a_distributed_checkpoint_equals_a_file(
    saved: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = compare(capfd, saved("ddp"), saved("dcp"))

    assert code == 0, text
    assert "28 tensors compared with no tolerance, all equal" in text


@pytest.mark.usefixtures("judge_program")
def test_one_changed_element_is_found_by_name(
    saved: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content = torch.load(saved("ddp"))
    content["model"]["module.block.q.weight"][3, 4] += 1e-6
    torch.save(content, tmp_path / "changed.pt")

    code, text = compare(capfd, saved("dcp"), tmp_path / "changed.pt")

    assert code == 1
    assert "first weight block.q.weight: differs from the reference" in text
    assert "1 of 36 elements differ; first at [3, 4]" in text


@pytest.mark.usefixtures("judge_program")
def test_exchanged_shards_of_a_distributed_checkpoint_are_found(
    saved: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows 0-2 and 3-5 of one tensor and of its moments, which have equal shards."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    wrong = tmp_path / "wrong"
    shutil.copytree(saved("dcp"), wrong)
    metadata = pickle.loads((wrong / ".metadata").read_bytes())
    key = "optim.state.block.q.weight.exp_avg"
    first, second = MetadataIndex(key, [0, 0]), MetadataIndex(key, [3, 0])
    places = metadata.storage_data
    places[first], places[second] = places[second], places[first]
    (wrong / ".metadata").write_bytes(pickle.dumps(metadata))

    code, text = compare(capfd, saved("dcp"), wrong)

    assert code == 1
    assert "first optimizer state block.q.weight.exp_avg" in text
    assert "the halves of dim 0 are in the order 1, 0" in text


def test_a_lost_shard_is_refused_by_name(
    saved: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(saved("dcp"), wrong)
    (wrong / "__1_0.distcp").unlink()

    code, text = compare(capfd, saved("dcp"), wrong)

    assert code == 3
    assert "__1_0.distcp: is missing" in text


def test_a_lost_part_of_the_metadata_is_refused_by_name(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(saved("dcp"), wrong)
    metadata = pickle.loads((wrong / ".metadata").read_bytes())
    del metadata.state_dict_metadata["model.head.weight"].chunks[1]
    (wrong / ".metadata").write_bytes(pickle.dumps(metadata))

    with pytest.raises(CheckpointError, match="parts of model.head.weight must cover"):
        convert(wrong, tmp_path / "x.safetensors")


def test_a_truncated_shard_is_refused_by_name(saved: Callable[[str], Path], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(saved("dcp"), wrong)
    shard = wrong / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])

    with pytest.raises(CheckpointError, match="__1_0.distcp: must hold"):
        convert(wrong, tmp_path / "x.safetensors")


# frameworks that may be missing

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


@pytest.mark.live
@needs_megatron
def test_megatrons_checkpoint_equals_a_file(saved: Callable[[str], Path], tmp_path: Path) -> None:
    got = tensors_of(saved("megatron"), tmp_path)

    assert_equal(got, tensors_of(saved("ddp"), tmp_path))


@pytest.mark.live
@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_stages_equal_a_file(
    saved: Callable[[str], Path], tmp_path: Path, stage: int
) -> None:
    got = tensors_of(saved(f"zero{stage}"), tmp_path)

    assert_equal(got, tensors_of(saved("ddp"), tmp_path))


@pytest.mark.live
@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 3])
def test_damaged_deepspeed_checkpoints_are_found(
    saved: Callable[[str], Path], tmp_path: Path, stage: int
) -> None:
    right = tensors_of(saved(f"zero{stage}"), tmp_path)
    wrong = tmp_path / "wrong"
    shutil.copytree(saved(f"zero{stage}"), wrong)
    files = sorted((wrong / "step2").glob("*_optim_states.pt"))
    assert len(files) == 2
    first, second = (file.read_bytes() for file in files)

    files[0].write_bytes(second)
    files[1].write_bytes(first)
    exchanged = tensors_of(wrong, tmp_path)
    differing = {name for name in right if not torch.equal(exchanged[name], right[name])}
    assert "block.up.weight.exp_avg" in differing
    files[1].unlink()
    with pytest.raises(CheckpointError, match="the files of 1 ranks"):
        convert(wrong, tmp_path / "x.safetensors")
