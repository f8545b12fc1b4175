# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is all tensors that can be reached in its files, wherever they are."""

from __future__ import annotations

import copy
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isoshard import cli
from isoshard._convert import read
from isoshard._folders import Reading
from isoshard._safetensors import write_safetensors

pytestmark = pytest.mark.usefixtures("judge_program")
Tensors = dict[str, torch.Tensor]
EQUAL, DIFFERS, USAGE, NOT_READ = 0, 1, 2, 3


def weights(add: float = 0.0) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (2, 3)}
    return {n: torch.randn(s, generator=generator) + add for n, s in shapes.items()}


def states(add: float = 0.0, names: bool = False, groups: int = 1) -> dict[str, Any]:
    """What an AdamW of torch saves of `weights`, its moments moved by `add`."""
    parameters = [torch.nn.Parameter(t) for t in weights().values()]
    parts = [parameters[i::groups] for i in range(groups)]
    optimizer = torch.optim.AdamW([{"params": part} for part in parts])
    sum(p.square().sum() for p in parameters).backward()
    optimizer.step()
    content = copy.deepcopy(optimizer.state_dict())
    for state in content["state"].values():
        state["exp_avg"] += add
    if names:
        content["param_groups"][0]["param_names"] = list(weights())
    return content


def one_state(add: float) -> dict[str, Any]:
    state = {"exp_avg": torch.ones(3) + add, "step": torch.tensor(1.0)}
    return {"state": {0: state}, "param_groups": [{"params": [0]}]}


def compare(tmp_path: Path, *words: str) -> int:
    """The exit code for what was written as a* and b*."""
    a, b = (next(p for p in sorted(tmp_path.iterdir()) if p.stem == side) for side in "ab")
    return cli.main(["compare", "--checkpoint", str(a), str(b), *words])


CONTENTS: dict[str, Callable[[float], Any]] = {
    "average": lambda d: {"model": weights(), "ema": weights(d)},
    "another_key": lambda d: {"net": weights(d), "optimizer": states()},
    "second_network": lambda d: {"model": weights(), "discriminator": weights(d)},
    "two_keys_of_a_model": lambda d: {"model": weights(), "state_dict": weights(d)},
    "a_list": lambda d: {"model": {"head": torch.ones(2), "layers": [torch.ones(3) + d]}},
    "a_tensor_beside": lambda d: {"w": weights()["a.bias"], "optimizer": one_state(d)},
    "a_list_alone": lambda d: [torch.ones(2), torch.ones(3) + d],
    "a_tuple_in_a_list": lambda d: {"model": weights(), "x": [[], (1, torch.ones(2) + d)]},
    "three_dictionaries_deep": lambda d: {"state": {"of": {"net": weights(d)}}, "epoch": 1},
    "lightning": lambda d: {"state_dict": weights(), "optimizer_states": [states(d)]},
    "two_optimizers": lambda d: {"state_dict": weights(), "optimizers": [states(), states(d)]},
    "named_optimizers": lambda d: {"g": weights(), "og": states(0, True), "od": states(d, True)},
    "an_optimizer_alone": lambda d: states(d, names=True),
    "groups_by_number": lambda d: {"model": weights(), "optimizer": states(d, groups=2)},
    "masters_in_an_optimizer": lambda d: {
        "model": weights(),
        "optimizer": {"inner": states(), "fp32_groups": [[torch.ones(5) + d]]},
    },
    "a_list_in_a_state": lambda d: {
        "model": weights(),
        "optimizer": {
            "state": {n: {"dirs": [torch.ones(3) + d]} for n in weights()},
            "param_groups": [],
        },
    },
    "a_rate_that_is_a_tensor": lambda d: {
        "model": weights(),
        "optimizer": {
            "state": {n: {"exp_avg": torch.ones(2)} for n in weights()},
            "param_groups": [{"params": list(weights()), "lr": torch.tensor(1e-3 + d)}],
        },
    },
}


@pytest.mark.parametrize("name", CONTENTS)
def test_every_tensor_of_a_file_counts(tmp_path: Path, name: str) -> None:
    torch.save(CONTENTS[name](0), tmp_path / "a.pt")
    torch.save(CONTENTS[name](0), tmp_path / "b.pt")
    assert compare(tmp_path) == EQUAL

    torch.save(CONTENTS[name](1), tmp_path / "b.pt")
    assert compare(tmp_path) == DIFFERS


def test_what_one_file_lacks_is_missing(tmp_path: Path) -> None:
    torch.save({"model": weights(), "ema": weights()}, tmp_path / "a.pt")
    torch.save({"model": weights()}, tmp_path / "b.pt")

    assert compare(tmp_path) == DIFFERS
    assert compare(tmp_path, "--not-recorded", "param/ema.*") == EQUAL


def test_numbers_on_one_side_alone_are_refused(tmp_path: Path) -> None:
    torch.save({"model": weights(), "optimizer": states(groups=2)}, tmp_path / "a.pt")
    torch.save({"model": weights(), "optimizer": states(names=True)}, tmp_path / "b.pt")

    assert compare(tmp_path) == NOT_READ
    assert compare(tmp_path, "--weights") == EQUAL


def test_states_have_the_names_of_the_model_s_tensors(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "optimizer": one_state(0)}, tmp_path / "a.pt")
    torch.save({"model": weights(), "optimizer": states()}, tmp_path / "b.pt")
    torch.save(states(groups=2), tmp_path / "optimizer.pt")

    def names(file: str) -> set[str]:
        return set(read(tmp_path / file, Reading()).tensors())

    assert names("a.pt") == {"w", "w.exp_avg", "w.step"}
    ends = ("", ".exp_avg", ".exp_avg_sq", ".step")
    assert names("b.pt") == {name + end for name in weights() for end in ends}
    assert "optimizer.2.exp_avg" in names("optimizer.pt")


# folders


def safetensors(path: Path, tensors: Tensors) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(path, list(tensors.items()))


def adapter(folder: Path, d: float) -> None:
    safetensors(folder / "adapter_model.safetensors", weights(d))


def adapter_in_a_folder(folder: Path, d: float) -> None:
    safetensors(folder / "adapter/adapter_model.safetensors", weights(d))


def second_index(folder: Path, d: float) -> None:
    safetensors(folder / "ema-1.safetensors", weights(d))
    index = {"weight_map": dict.fromkeys(weights(), "ema-1.safetensors")}
    (folder / "ema.safetensors.index.json").write_text(json.dumps(index))


def optimizer_of_a_trainer(folder: Path, d: float) -> None:
    torch.save(states(d, groups=2), folder / "optimizer.pt")


def one_tensor(folder: Path, d: float) -> None:
    torch.save(torch.ones(3) + d, folder / "mean.pth")


def unknown_classes(folder: Path, d: float) -> None:
    torch.save({"args": Namespace(a=1), "t": torch.ones(3) + d}, folder / "extra.bin")


def another_format(folder: Path, d: float) -> None:
    (folder / "flax_model.msgpack").write_bytes(bytes([int(d), 7]))


BESIDE = [adapter, adapter_in_a_folder, second_index, optimizer_of_a_trainer, one_tensor,
          unknown_classes, another_format]  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("is_indexed", [False, True])
def test_every_file_of_a_folder_counts(
    tmp_path: Path, beside: Callable[[Path, float], None], is_indexed: bool
) -> None:
    for side in "ab":
        name = "model-1.safetensors" if is_indexed else "model.safetensors"
        safetensors(tmp_path / side / name, weights())
        if is_indexed:
            index = {"weight_map": dict.fromkeys(weights(), name)}
            (tmp_path / side / "model.safetensors.index.json").write_text(json.dumps(index))
        (tmp_path / side / "tokenizer.json").write_text(side)
        beside(tmp_path / side, 0)
    torch.save(Namespace(seed=1), tmp_path / "b" / "training_args.bin")  # no tensor
    assert compare(tmp_path) == EQUAL

    beside(tmp_path / "b", 1)
    assert compare(tmp_path) == DIFFERS
    patterns = "file/adapter*,file/ema-*,file/*.pt,file/*.pth,file/extra.bin,file/*.msgpack"
    assert compare(tmp_path, "--not-recorded", patterns) == EQUAL


def test_a_file_that_one_folder_lacks_is_missing(tmp_path: Path) -> None:
    for side in "ab":
        safetensors(tmp_path / side / "model.safetensors", weights())
    adapter(tmp_path / "a", 0)

    assert compare(tmp_path) == DIFFERS


def test_an_older_checkpoint_beside_the_newest_does_not_count(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    for side, old in (("a", 0.0), ("b", 1.0)):
        for iteration, d in (("iter_0000001", old), ("iter_0000002", 0.0)):
            folder = tmp_path / side / iteration
            dcp.save({"model": weights(d)}, checkpoint_id=folder, no_dist=True)
        (tmp_path / side / "latest_checkpointed_iteration.txt").write_text("2")
    assert compare(tmp_path) == EQUAL

    torch.save(weights(1), tmp_path / "b/iter_0000002/common.pt")
    assert compare(tmp_path) == DIFFERS


@pytest.mark.parametrize("key", ["ema", "optim.extra", "opt_d.state"])
def test_every_tensor_of_a_distributed_checkpoint_counts(tmp_path: Path, key: str) -> None:
    import torch.distributed.checkpoint as dcp

    def content(d: float) -> dict[str, Any]:
        of_names = {n: {"exp_avg": t} for n, t in weights().items()}
        moved = {n: {"exp_avg": t} for n, t in weights(d).items()}
        whole: dict[str, Any] = {"model": weights(), "opt_g": {"state": of_names}}
        head, _, rest = key.partition(".")
        whole[head] = {rest: moved if rest == "state" else weights(d)} if rest else weights(d)
        return whole

    dcp.save(content(0), checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.save(content(0), checkpoint_id=tmp_path / "b", no_dist=True)
    assert compare(tmp_path) == EQUAL
    dcp.save(content(1), checkpoint_id=tmp_path / "b", no_dist=True)
    assert compare(tmp_path) == DIFFERS


BROKEN = {
    "no JSON": "{",
    "no weight_map": "{}",
    "empty": '{"weight_map": {}}',
    "no names": '{"weight_map": {"a.weight": 3}}',
    "lost file": '{"weight_map": {"a.weight": "gone.safetensors"}}',
    "outside": '{"weight_map": {"a.weight": "../a/model-1.safetensors"}}',
    "too few": '{"weight_map": {"a.weight": "model-1.safetensors"}}',
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("has_files", [False, True])
def test_a_broken_index_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, has_files: bool
) -> None:
    safetensors(tmp_path / "a" / "model.safetensors", weights())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "model.safetensors.index.json").write_text(BROKEN[name])
    if has_files:
        safetensors(tmp_path / "b" / "model-1.safetensors", weights())

    assert compare(tmp_path) == NOT_READ
    assert "model.safetensors.index.json" in capfd.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["a.bias"].update(data_offsets=[0, 12]),
        lambda h: h["a.bias"].update(shape=[1 << 40, 1 << 40]),
        lambda h: h["a.bias"].update(shape=[-3]),
        lambda h: h["a.bias"].update(dtype="F4"),
        lambda h: h.pop("a.bias"),
    ],
)
def test_a_malformed_file_beside_the_model_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    for side in "ab":
        safetensors(tmp_path / side / "model.safetensors", weights())
        adapter(tmp_path / side, 0)
    path = tmp_path / "b" / "adapter_model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    assert compare(tmp_path) == NOT_READ
