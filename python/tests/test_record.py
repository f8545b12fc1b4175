# SPDX-License-Identifier: Apache-2.0
"""Recording in one process, and what the judge says of the bundles."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isoshard
from isoshard import RecordError, RunError, _bundle, _program
from isoshard._program import respond


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(8, 16), nn.GELU()
        self.drop, self.down_proj = nn.Dropout(dropout), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.drop(self.act(self.up(x))))


def train(
    path: Path, *, micro: int = 1, scale: float = 1.0, dropout: float = 0.0, **k: Any
) -> None:
    torch.manual_seed(0)
    model = Mlp(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with isoshard.record(path, model, optimizer, **k):
        for _ in range(2):
            for part in batch.chunk(micro):
                (model(part).square().mean() / micro).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(scale)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def keys(path: Path, step: int = 0) -> set[str]:
    records = _bundle.read_records(path, step, 0)["records"]
    return {f"{r['kind']}/{r['name']}/{r['call']}" for r in records}


def test_a_bundle_has_every_kind_of_record(tmp_path: Path) -> None:
    train(tmp_path / "a")

    found = keys(tmp_path / "a")
    for key in (
        "param/up.weight/0",
        "param/up.weight/1",
        "grad/up.bias/0",
        "activation/up/0",
        "activation/act/0",
        "activation_grad/down_proj/0",
        "optimizer/up.weight.exp_avg/0",
        "scalar/loss/0",
        "scalar/grad_norm/0",
        "scalar/learning_rate/0",
        "data_id/input_ids/0",
    ):
        assert key in found
    assert not any(key.startswith("param/up.weight/1") for key in keys(tmp_path / "a", 1))


def test_the_manifest_seals_every_file(tmp_path: Path) -> None:
    train(tmp_path / "a")

    manifest = _bundle.read_manifest(tmp_path / "a")
    files = {p.relative_to(tmp_path / "a").as_posix() for p in (tmp_path / "a").rglob("*.*")}
    assert set(manifest["files"]) == files - {"manifest.json"}
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((tmp_path / "a" / name).read_bytes()).hexdigest() == digest
    training = manifest["settings"]["training"]
    assert training["dtype"] == "fp32"
    assert training["optimizer"]["kind"] == "adamw"
    assert training["max_grad_norm"] == 1.0


def test_micro_batches_are_joined(tmp_path: Path) -> None:
    train(tmp_path / "a", micro=2)

    shapes = {
        (r["kind"], r["name"]): r["local_shape"]
        for r in _bundle.read_records(tmp_path / "a", 0, 0)["records"]
    }
    assert shapes[("activation", "up")] == [4, 16]
    assert shapes[("activation_grad", "up")] == [4, 16]


def reference(tmp_path: Path) -> Path:
    train(tmp_path / "ref", subject="reference")
    perturbed = []
    for seed in range(3):
        perturbed.append(tmp_path / f"p{seed}")
        train(perturbed[-1], perturb=seed)
    respond(tmp_path / "ref", perturbed)
    return tmp_path / "ref"


@pytest.mark.usefixtures("judge_program")
def test_the_judge_takes_what_is_right_and_finds_what_is_wrong(tmp_path: Path) -> None:
    path = reference(tmp_path)
    train(tmp_path / "right", micro=2)
    train(tmp_path / "wrong", scale=1.001)

    assert _program.call(["compare", str(path), str(tmp_path / "right")], capture=True)[0] == 0
    code, text = _program.call(["compare", str(path), str(tmp_path / "wrong")], capture=True)
    assert code == 1
    assert "first gradient of up.weight (step 0)" in text


@pytest.mark.usefixtures("judge_program")
def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "a")
    path = tmp_path / "a" / "step0000" / "rank00000.json"
    path.write_text(path.read_text().replace("up.bias", "up.bows"))

    code, _ = _program.call(["compare", str(tmp_path / "a"), str(tmp_path / "a")], capture=True)
    assert code == 3


def test_level_two_changes_names_and_values(tmp_path: Path) -> None:
    def split(kind: str, name: str, tensor: torch.Tensor) -> Any:
        if kind == "param" and name == "up.weight":
            return {"up.low.weight": tensor[:8], "up.high.weight": tensor[8:]}
        return None if name == "act" else tensor

    train(
        tmp_path / "a",
        rename={"down_proj.weight": "out.weight"},
        transform=split,
        not_recorded={"grad/*.bias": "not of interest"},
    )

    found = keys(tmp_path / "a")
    assert {"param/out.weight/0", "param/up.low.weight/1", "param/up.high.weight/0"} <= found
    assert not {"param/up.weight/0", "activation/act/0", "grad/up.bias/0"} & found
    patterns = [entry["pattern"] for entry in _bundle.read_manifest(tmp_path / "a")["not_recorded"]]
    assert "grad/*.bias" in patterns


def test_dropout_is_refused_or_switched_off(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="Dropout must be 0, got 0.1 in drop"):
        train(tmp_path / "a", dropout=0.1)
    train(tmp_path / "a", dropout=0.1, no_dropout=True)
    assert "scalar/loss/0" in keys(tmp_path / "a")


def test_no_optimizer_step_is_an_error(tmp_path: Path) -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RecordError, match="at least one optimizer step, got none"),
        isoshard.record(tmp_path / "a", model, optimizer),
    ):
        model(torch.randn(2, 8)).sum().backward()


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(Mlp().parameters(), lr=0.1)
    with (
        pytest.raises(RecordError, match="must step parameters of the recorded model"),
        isoshard.record(tmp_path / "a", Mlp(), optimizer),
    ):
        pass


def test_a_folder_with_something_else_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(RecordError, match="holds something else"):
        train(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_recomputation_is_not_recorded_twice(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = checkpoint(super().forward, x, use_reentrant=False)
            assert isinstance(result, torch.Tensor)
            return result

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isoshard.record(tmp_path / "a", model, optimizer):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    assert "activation/up/0" in keys(tmp_path / "a")
    assert "activation/up/1" not in keys(tmp_path / "a")


@pytest.mark.usefixtures("judge_program")
def test_a_perturbed_run_with_the_reference_s_weights_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "ref")
    train(tmp_path / "same")
    with pytest.raises(RunError, match="must show how far the reference"):
        respond(tmp_path / "ref", [tmp_path / "same"])
