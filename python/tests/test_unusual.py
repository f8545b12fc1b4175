# SPDX-License-Identifier: Apache-2.0
"""Optimizers, gradients and buffers of unusual kinds: right runs with them conform."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isoshard
from isoshard import _bundle, _program
from isoshard._inputs import as_input
from isoshard._program import respond
from isoshard._settings import optimizer_settings


class Table(nn.Module):
    """Reads some rows of an embedding; a row that is hardly read has a gradient near 0."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8, sparse=sparse), nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


#: One optimizer, or several.
MakeOptimizer = Callable[[nn.Module], Any]


def train(path: Path, model: nn.Module, make: MakeOptimizer, **options: Any) -> None:
    """Two steps. The bias has gradients that cancel but for roundings."""
    made = make(model)
    optimizers = made if isinstance(made, list) else [made]
    ids = torch.arange(12).reshape(2, 6)
    with isoshard.record(path, model, optimizers, **options):
        for _ in range(2):
            model(ids).softmax(-1).square().sum().mul(1e-3).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def judged(folder: Path, build: Callable[[], nn.Module], make: MakeOptimizer) -> tuple[int, str]:
    """The verdict on a run that repeats its reference."""
    for name, seed in (("ref", None), ("p0", 0), ("p1", 1), ("p2", 2), ("run", None)):
        torch.manual_seed(0)
        train(folder / name, build(), make, perturb=seed)
    respond(folder / "ref", [folder / f"p{i}" for i in range(3)])
    words = ["compare", "--verbose", str(folder / "ref"), str(folder / "run")]
    return _program.call(words, capture=True)


class AdamW(torch.optim.Optimizer):
    """Adam without the correction of the bias, under a name that promises it."""

    def __init__(self, parameters: Any) -> None:
        options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                for key in () if state else ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt() + 1e-8, value=-group["lr"])


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 1e-4, "weight_decay": 0.0}, {"params": rest, "eps": 1e-9}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.5)


def test_the_largest_step_of_all_groups_is_told(tmp_path: Path) -> None:
    settings = optimizer_settings(two_groups(Table()))
    assert (settings["learning_rate"], settings["weight_decay"]) == (1e-2, 0.5)
    assert (settings["eps"], settings["beta1"], settings["beta2"]) == (1e-9, 0.9, 0.999)

    train(tmp_path / "a", Table(), two_groups)
    tensors = _bundle.read_tensors(tmp_path / "a", 0, 0)
    assert tensors["scalar/learning_rate/0"].tolist() == [1e-2]


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.RAdam, AdamW])
def test_another_rule_than_adam_s_has_no_bound(make: Any) -> None:
    settings = optimizer_settings(make(Table().parameters()))
    assert "beta1" not in settings and "beta2" not in settings
    assert settings["moment_decays"] == [0.9, 0.999]


def test_groups_with_other_betas_have_no_bound() -> None:
    table = Table().embed.weight, Table().head.weight
    groups = [{"params": [p], "betas": (b, 0.9)} for p, b in zip(table, (0.5, 0.8), strict=True)]
    settings = optimizer_settings(torch.optim.AdamW(groups))
    assert settings["moment_decays"] == [[0.5, 0.9], [0.8, 0.9]] and "beta1" not in settings


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = model.parameters()
    return [torch.optim.SGD([first], lr=0.5, momentum=0.9), torch.optim.AdamW(rest, lr=1e-3)]


def test_several_optimizers_have_the_rule_of_the_largest_step(tmp_path: Path) -> None:
    settings = optimizer_settings(*two_optimizers(Table()))
    assert (settings["kind"], settings["learning_rate"], settings["beta1"]) == (
        "adamw+sgd",
        0.5,
        0.9,
    )
    assert "beta1" not in optimizer_settings(AdamW(Table().parameters()), *two_optimizers(Table()))
    train(tmp_path / "a", Table(), lambda m: two_optimizers(m)[::-1])
    assert _bundle.read_tensors(tmp_path / "a", 0, 0)["scalar/learning_rate/0"].tolist() == [0.5]


RIGHT = [
    two_groups,
    two_optimizers,
    lambda m: AdamW(m.parameters()),
    lambda m: torch.optim.NAdam(m.parameters()),
    lambda m: torch.optim.Adafactor(m.parameters()),
]


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize("make", RIGHT)
def test_a_right_run_moves_no_more_than_it_may(tmp_path: Path, make: MakeOptimizer) -> None:
    code, text = judged(tmp_path, Table, make)
    assert code == 0, text


def test_an_optimizer_without_a_learning_rate_is_recorded(tmp_path: Path) -> None:
    class Sign(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad.sign(), alpha=1e-3)

    train(tmp_path / "a", Table(), lambda m: Sign(m.parameters(), {}))
    assert "scalar/learning_rate/0" not in _bundle.read_tensors(tmp_path / "a", 0, 0)


def test_sparse_gradients_are_recorded_as_dense_ones(tmp_path: Path) -> None:
    found = []
    for name, sparse in (("dense", False), ("sparse", True)):
        torch.manual_seed(0)
        train(tmp_path / name, Table(sparse=sparse), lambda m: torch.optim.SGD(m.parameters(), 0.1))
        found.append(_bundle.read_tensors(tmp_path / name, 0, 0)["grad/embed.weight/0"])
    assert found[0].abs().sum() > 0 and torch.equal(*found)


_CLOSURE = """
import torch
from torch import nn
model = nn.Linear(4, 4)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss
for _ in range(2):
    optimizer.step(closure)
"""


def test_a_model_that_is_first_called_in_a_closure_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "closure.py"
    script.write_text(_CLOSURE)
    program = (
        "import sys\n"
        "from isoshard._auto import AutoConfig, AutoRecorder, run_script\n"
        "recorder = AutoRecorder(AutoConfig(sys.argv[2], stop=False))\n"
        "recorder.install()\n"
        "code = run_script(sys.argv[1], [], False)\n"
        "recorder.finish()\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", program, str(script), str(tmp_path / "a")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    for step in range(2):
        names = set(_bundle.read_tensors(tmp_path / "a", step, 0))
        assert {"grad/weight/0", "scalar/loss/0", "scalar/learning_rate/0"} <= names
        assert "scalar/learning_rate/1" not in names and "grad/weight/1" not in names


class Coarse(Table):
    """fp32 parameters beside an fp16 buffer, which a step may change."""

    def __init__(self, moves: float = 0.0) -> None:
        super().__init__()
        self.moves = moves
        self.kept = nn.Buffer(torch.linspace(0, 1, 5).half())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.kept += self.moves
        return super().forward(ids)


def test_a_buffer_that_stays_as_it_is_makes_nothing_coarse(tmp_path: Path) -> None:
    found = []
    for moves in (0.0, 0.5):
        train(tmp_path / "a", Coarse(moves), lambda m: torch.optim.SGD(m.parameters(), 0.1))
        found.append(_bundle.read_manifest(tmp_path / "a")["settings"]["judging"])
    assert found[0]["coarsest_dtype"] == "fp32"
    assert "coarsest_dtype" not in found[1]  # the judge then takes it from all records


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8, dtype=torch.cfloat))
        self.head = nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.weight[ids].abs())


@pytest.mark.usefixtures("judge_program")
def test_complex_parameters_are_judged_by_their_parts(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1)

    code, text = judged(tmp_path, Complex, make)
    assert code == 0, text
    weight = _bundle.read_tensors(tmp_path / "ref", 0, 0)["param/weight/0"]
    moved = _bundle.read_tensors(tmp_path / "p0", 0, 0)["param/weight/0"]
    assert weight.shape == (12, 8, 2) and weight.dtype == torch.float32
    assert (weight != moved).all()

    class Wrong(Complex):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if self.weight.grad is None and self.weight.requires_grad:
                self.weight.register_hook(lambda grad: grad.conj())
            return super().forward(ids)

    torch.manual_seed(0)
    train(tmp_path / "run", Wrong(), make)
    words = ["compare", "--verbose", str(tmp_path / "ref"), str(tmp_path / "run")]
    code, text = _program.call(words, capture=True)
    assert code == 1
    assert "first gradient of weight" in text


def test_complex_inputs_are_told_apart_by_both_parts() -> None:
    value = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0]))
    assert torch.equal(as_input(value), torch.tensor([[1.0, 3.0], [2.0, -4.0]]))
    assert not torch.equal(as_input(value), as_input(value.conj()))


def test_floats_of_8_bits_are_recorded_as_their_bits() -> None:
    value = torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e5m2)
    assert torch.equal(as_input(value).view(torch.float8_e5m2).float(), value.float())


class OfFloats(nn.Module):
    """Computes in fp32 whatever floats it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.float()))


def train_on_floats(path: Path, x: torch.Tensor, perturb: int | None = None) -> None:
    torch.manual_seed(0)
    model = OfFloats()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with isoshard.record(path, model, optimizer, perturb=perturb):
        model(x).square().mean().backward()
        optimizer.step()


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_inputs_of_floating_point_are_recorded_as_such(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(6, 8).to(dtype)
    x[0, :2] = torch.tensor([-torch.inf, torch.nan])
    train_on_floats(tmp_path, x)
    records = _bundle.read_records(tmp_path, 0, 0)["records"]
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    said = [r["dtype"] for r in records if r["kind"] == "data_id"]
    assert said == [names.get(dtype, "fp64")]
    recorded = _bundle.read_tensors(tmp_path, 0, 0)["data_id/input_ids/0"]
    assert recorded.dtype is dtype and torch.equal(recorded.nan_to_num(9), x.nan_to_num(9))


@pytest.mark.parametrize("dtype", FLOATS)
def test_inputs_of_floating_point_are_no_tokens(tmp_path: Path, dtype: torch.dtype) -> None:
    """Signs are no mask of labels; a scaled sample is none that the batch has not."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    others = torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[:, 0] = 0.1
    masked = x.clone()
    masked[:, 0] = -0.1
    train_on_floats(tmp_path / "ref", x)
    for seed in range(3):
        train_on_floats(tmp_path / f"p{seed}", x, perturb=seed)
    respond(tmp_path / "ref", [tmp_path / f"p{seed}" for seed in range(3)])
    causes = []
    for name, seen in (("same", x), ("scaled", -2 * x), ("masked", masked), ("others", others)):
        train_on_floats(tmp_path / name, seen)
        words = [str(tmp_path / "ref"), str(tmp_path / name), "--report", str(tmp_path / "r.json")]
        code, text = _program.call(["compare", *words], capture=True)
        assert code == (0 if seen is x else 1), text
        (case,) = json.loads((tmp_path / "r.json").read_text())["cases"]
        first = case["findings"][0] if case["findings"] else {"kind": "data_id"}
        assert first["kind"] == "data_id"
        causes.append(first.get("cause") and first["cause"]["id"])
    assert causes == [None, None, None, "samples_foreign"]
