# SPDX-License-Identifier: Apache-2.0
"""Runs that agree and show nothing, each with a control that is judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_judge import judge

pytestmark = pytest.mark.usefixtures("judge_program")

_HEAD = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
batches = torch.randn(5, 8, 16, generator=torch.Generator().manual_seed(5))
"""
_TAIL = """
dist.destroy_process_group()
"""
_NATIVE = ("--precision", "native")


def judged(folder: Path, body: str, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code of `isoshard judge`, and the verdict of report.json."""
    script = folder / "train.py"
    script.write_text(_HEAD + body + _TAIL)
    output = folder / "out"
    words = (*_NATIVE, "--output-dir", str(output), *options)
    code, text = judge(script, 2, options=words)
    assert (output / "report" / "report.json").exists(), text
    (verdict,) = json.loads((output / "report" / "report.json").read_text())["cases"]
    return code, verdict


_WHOLE_ON_EACH_RANK = """
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x in batches:
    nn.functional.mse_loss(model(x), x.roll(1, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_an_axis_that_nothing_uses_is_vacuous(tmp_path: Path, axis: str) -> None:
    code, verdict = judged(tmp_path, _WHOLE_ON_EACH_RANK, "--mesh", f"{axis}=2")
    assert code == 1
    assert verdict["rule"]["id"] == "axis_without_witness"
    assert verdict["rule"]["words"]["axis"] == axis


_DDP = """
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in batches:
    part = {part}
    nn.functional.mse_loss(model(part), part.flip(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_equal_samples_on_all_ranks_are_no_witness_of_dp(tmp_path: Path) -> None:
    right = tmp_path / "right"
    right.mkdir()
    code, verdict = judged(right, _DDP.format(part="x.chunk(world)[rank]"))
    assert code == 0
    (axis,) = verdict["axes"]
    assert axis["axis"] == "dp"
    assert axis["witness"] is not None
    equal = "x[:4] if world > 1 else x[:4].repeat(2, 1)"
    code, verdict = judged(tmp_path, _DDP.format(part=equal))
    assert code == 1
    assert verdict["rule"]["id"] == "axis_without_witness"


_DEAD = """
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
nn.init.constant_(model[2].bias, -100.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in batches:
    part = x.chunk(world)[rank]
    nn.functional.mse_loss(model(part), torch.zeros_like(part)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_gradients_that_are_all_zero_are_vacuous(tmp_path: Path) -> None:
    code, verdict = judged(tmp_path, _DEAD)
    assert code == 1
    assert verdict["rule"]["id"] == "gradients_zero"


_GROUPS = """
model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
many = world > 1
groups = [
    {{"params": model[:2].parameters(), "lr": 1e-4 * ({rate}), "weight_decay": {decay}}},
    {{"params": model[2:].parameters(), "lr": 1e-3, "weight_decay": 0.1}},
]
optimizer = torch.optim.AdamW(groups)
wrapped = nn.parallel.DistributedDataParallel(model)
for x in batches:
    part = x.chunk(world)[rank]
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(wrapped(part).float(), part.flip(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("rate", "decay", "name"),
    [("1", "0.1", None), ("2 ** 0.5 if many else 1", "0.1", "lr")]
    + [("1", "0 if many else 0.1", "weight_decay")],
)
def test_hyperparameters_of_a_group_are_exact_in_16_bits(
    tmp_path: Path, rate: str, decay: str, name: str | None
) -> None:
    code, verdict = judged(tmp_path, _GROUPS.format(rate=rate, decay=decay))
    if name is None:
        assert code == 0, verdict["reason"]
        return
    assert code == 1
    cause = verdict["findings"][0]["cause"]
    assert cause["id"] == "hyperparameters_differ"
    assert cause["words"]["name"] == name


def test_a_step_whose_rate_is_0_is_not_counted(tmp_path: Path) -> None:
    schedule = "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: s / 10)\nfor x in"
    warm = _DDP.format(part="x.chunk(world)[rank]").replace("for x in", schedule)
    warm = warm.replace("optimizer.step()", "optimizer.step()\n    schedule.step()")
    code, verdict = judged(tmp_path, warm, "--steps", "2")
    assert code == 0, verdict["reason"]
    steps = {tensor["step"] for tensor in verdict["tensors"]}
    assert steps == {0, 1, 2}
