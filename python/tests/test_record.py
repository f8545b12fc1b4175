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
    words = ["compare", str(path), str(tmp_path / "wrong"), "--verbose"]
    code, text = _program.call(words, capture=True)
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


def test_an_error_of_the_recorder_is_none_of_the_script(tmp_path: Path) -> None:
    def transform(kind: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if kind == "grad":
            raise ValueError("no halves")
        return tensor

    with pytest.raises(RecordError, match=r"ValueError: no halves \(in transform, test_record.py:"):
        train(tmp_path / "a", transform=transform)


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
    with pytest.raises(RecordError, match="must be empty or an older bundle"):
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


def records(path: Path, step: int = 0) -> dict[str, torch.Tensor]:
    return _bundle.read_tensors(path, step, 0)


class WithBuffers(Mlp):
    """Counts its calls, and remembers a mean."""

    def __init__(self, wrong: float = 0.0) -> None:
        super().__init__()
        self.wrong = wrong
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("temporary", torch.zeros(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.get_buffer("mean").lerp_(x.mean(0), 0.1 + self.wrong)
            self.get_buffer("count").add_(1)
        return super().forward(x)


def test_all_functions_are_put_back(tmp_path: Path) -> None:
    owners = (torch, torch.autograd, torch.distributed, nn.functional, nn.utils)
    classes = (torch.Tensor, nn.Module, torch.optim.Optimizer, torch.optim.AdamW)
    train(tmp_path / "first")  # torch replaces functions of its own when it first trains
    before = {owner: dict(vars(owner)) for owner in (*owners, *classes)}

    train(tmp_path / "judged")
    train(tmp_path / "response", perturb=1)

    for owner, own in before.items():
        now = vars(owner)
        assert {n for n, value in own.items() if now.get(n) is not value} == set(), owner


def train_any(
    path: Path, model: nn.Module, parameters: list[torch.Tensor] | None = None, **k: Any
) -> None:
    """Two steps of a model whose output is multiplied with the parameters beside it."""
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    outside = parameters or []
    optimizer = torch.optim.SGD([*model.parameters(), *outside], lr=0.1)
    with isoshard.record(path, model, optimizer, **k):
        for _ in range(2):
            output = model(batch)
            for parameter in outside:
                output = output * parameter
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.usefixtures("judge_program")
def test_buffers_are_recorded_and_judged(tmp_path: Path) -> None:
    for name, wrong, seed in (
        ("ref", 0.0, None),
        ("p0", 0.0, 0),
        ("p1", 0.0, 1),
        ("p2", 0.0, 2),
        ("right", 0.0, None),
        ("wrong", 0.01, None),
    ):
        torch.manual_seed(0)
        train_any(tmp_path / name, WithBuffers(wrong), perturb=seed)
    found = keys(tmp_path / "ref")
    assert {"optimizer/mean.buffer/0", "optimizer/count.buffer/0"} <= found
    assert "optimizer/temporary.buffer/0" not in found
    respond(tmp_path / "ref", [tmp_path / f"p{i}" for i in range(3)])
    words = ["compare", "--verbose", str(tmp_path / "ref")]
    assert _program.call([*words, str(tmp_path / "right")], capture=True)[0] == 0
    code, text = _program.call([*words, str(tmp_path / "wrong")], capture=True)
    assert code == 1
    assert "mean.buffer" in text


@pytest.mark.usefixtures("judge_program")
def test_parameters_beside_the_model_are_recorded_and_judged(tmp_path: Path) -> None:
    for name, start, seed in (
        ("ref", 2.0, None),
        ("p0", 2.0, 0),
        ("p1", 2.0, 1),
        ("p2", 2.0, 2),
        ("right", 2.0, None),
        ("wrong", 2.1, None),
    ):
        torch.manual_seed(0)
        scale = nn.Parameter(torch.tensor([start]))
        train_any(tmp_path / name, Mlp(), [scale], perturb=seed)
    assert {"param/outside.0/0", "param/outside.0/1", "grad/outside.0/0"} <= keys(tmp_path / "ref")
    respond(tmp_path / "ref", [tmp_path / f"p{i}" for i in range(3)])
    words = ["compare", "--verbose", str(tmp_path / "ref")]
    assert _program.call([*words, str(tmp_path / "right")], capture=True)[0] == 0
    code, text = _program.call([*words, str(tmp_path / "wrong")], capture=True)
    assert code == 1
    assert "first weight as read outside.0" in text


class Draws(Mlp):
    def __init__(self, how: str, p: float) -> None:
        super().__init__()
        self.how, self.p = how, p
        if how == "attention":
            self.extra: nn.Module = nn.MultiheadAttention(8, 2, dropout=p)
        elif how == "lstm":
            self.extra = nn.LSTM(8, 8, num_layers=2, dropout=p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "attention":
            x = self.extra(x, x, x)[0]
        elif self.how == "lstm":
            x = self.extra(x)[0]
        elif self.how == "functional":
            x = nn.functional.dropout(x, self.p)
        elif self.p > 0:
            x = x + torch.randn_like(x)
        return super().forward(x)


@pytest.mark.parametrize("how", ["attention", "lstm", "functional", "noise"])
def test_a_forward_pass_that_draws_is_refused(tmp_path: Path, how: str) -> None:
    with pytest.raises(RecordError, match=r"must draw no random numbers.*--no-dropout"):
        train_any(tmp_path / "a", Draws(how, 0.1))
    train_any(tmp_path / "a", Draws(how, 0.0))
    train_any(tmp_path / "b", Draws(how, 0.1), allow_draws=True)
    if how in ("attention", "lstm"):
        train_any(tmp_path / "c", Draws(how, 0.1), no_dropout=True)


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.SGD])
def test_gradients_of_a_closure_are_recorded(tmp_path: Path, optimizer: Any) -> None:
    torch.manual_seed(0)
    model = Mlp()
    steps = optimizer(model.parameters(), lr=0.1)
    batch = torch.randn(4, 8)
    wanted: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        steps.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()
        assert model.up.weight.grad is not None
        wanted.append(model.up.weight.grad.clone())
        return loss

    with isoshard.record(tmp_path / "a", model, steps):
        for _ in range(2):
            steps.step(closure)
    found = records(tmp_path / "a")
    assert torch.equal(found["grad/up.weight/0"], wanted[0])
    assert found["activation/up/0"].shape == (4, 16)
    assert "scalar/loss/0" in found and "activation/up/1" not in found
    second = records(tmp_path / "a", 1)["grad/up.weight/0"]
    assert any(torch.equal(second, gradient) for gradient in wanted[1:])


def test_each_optimizer_s_gradients_are_recorded_as_it_reads_them(tmp_path: Path) -> None:
    model = Mlp()
    first = torch.optim.SGD(model.up.parameters(), lr=0.1)
    second = torch.optim.SGD(model.down_proj.parameters(), lr=0.1)
    with isoshard.record(tmp_path / "a", model, [first, second]):
        model(torch.randn(4, 8)).square().mean().backward()
        first.step()
        model.down_proj.weight.grad.fill_(3.0)  # type: ignore[union-attr]
        second.step()
    found = records(tmp_path / "a")
    assert bool((found["grad/down_proj.weight/0"] == 3).all())
    assert "grad/up.weight/0" in found


def test_a_step_without_gradients_is_an_error(tmp_path: Path) -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(RecordError, match="must have gradients, got none in step 0"),
        isoshard.record(tmp_path / "a", model, optimizer),
    ):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.zero_grad()
        optimizer.step()


def test_inputs_inside_of_mappings_are_recorded(tmp_path: Path) -> None:
    class OfMapping(Mlp):
        def forward(self, x: Any) -> torch.Tensor:
            return super().forward(x["pixels"])

    model = OfMapping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isoshard.record(tmp_path / "a", model, optimizer):
        model({"pixels": torch.randn(4, 8), "names": ["a"]}).square().mean().backward()
        optimizer.step()
    assert "data_id/input_ids.pixels/0" in keys(tmp_path / "a")


def test_micro_batches_that_cannot_be_joined_are_calls(tmp_path: Path) -> None:
    class Twice(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isoshard.record(tmp_path / "a", model, optimizer):
        for length in (3, 5):
            model(torch.randn(2, length, 8)).square().mean().backward()
        optimizer.step()
    shapes = {k: list(v.shape) for k, v in records(tmp_path / "a").items() if "/up/" in k}
    for kind in ("activation", "activation_grad"):
        lengths = [shapes[f"{kind}/up/{call}"][1] for call in range(4)]
        assert lengths == [3, 3, 5, 5]


@pytest.mark.live
def test_an_optimizer_that_accelerate_prepared_is_recorded_as_itself(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    train(tmp_path / "plain", steps=1)
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with isoshard.record(tmp_path / "prepared", model, optimizer, steps=1):
        accelerator.backward(model(batch).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert keys(tmp_path / "prepared") == keys(tmp_path / "plain")
    settings = [_bundle.read_manifest(tmp_path / n)["settings"] for n in ("plain", "prepared")]
    assert settings[0] == settings[1]
