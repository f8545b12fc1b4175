# SPDX-License-Identifier: Apache-2.0
"""Losses that one rank computes otherwise, and optimizer steps that one rank leaves out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("judge_program")

SCRIPT = """\
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

variant = sys.argv[1]
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
is_odd = rank == 1 and world > 1
torch.manual_seed(0)
SEQUENCE, WORDS, MICROS = 6, 20, 3


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(WORDS, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, ids):
        hidden = torch.tanh(self.mix(self.embed(ids)))
        logits = self.head(hidden)
        if variant == "doubled_on_1_head_called_again":
            self.head(hidden / 2)  # its output is not used
        return logits


model = Tagger()
wrapped = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    ids, labels = torch.randint(0, WORDS, (12, SEQUENCE)), torch.randint(0, WORDS, (12, SEQUENCE))
    if variant != "right_mean_of_means":
        lengths = torch.randint(2, SEQUENCE + 1, (12,))
        labels[torch.arange(SEQUENCE)[None] >= lengths[:, None]] = -1
    count = int((labels != -1).sum())
    skips = variant == "skips_a_step" or variant == "skips_a_step_on_1" and is_odd
    ended = variant == "ends_early_on_1" and is_odd and step > 0
    for micro in range(MICROS):
        x, y = (t.chunk(MICROS)[micro].chunk(world)[rank] for t in (ids, labels))
        logits = wrapped(x).flatten(0, 1)
        if variant == "shifted_on_1" and is_odd:
            y = torch.cat([y[:, 1:], torch.full_like(y[:, :1], -1)], 1)
        if variant == "unmasked_on_1" and is_odd:
            y = y.clamp(min=0)
        if variant == "bf16_on_1" and is_odd:
            logits = logits.bfloat16()
        smoothing = 0.2 if variant == "smoothed_on_1" and is_odd else 0.0
        loss = F.cross_entropy(
            logits, y.flatten(), ignore_index=-1, reduction="sum", label_smoothing=smoothing
        )
        loss = loss.float() * world / count
        if variant == "right_mean_of_means":
            loss = F.cross_entropy(logits, y.flatten()) / MICROS
        if variant == "right_other_loss":
            loss = logits.pow(4).mean() / MICROS
        if variant.startswith("doubled_on_1") and is_odd:
            loss = 2 * loss
        if variant == "last_twice_on_1" and is_odd and micro == MICROS - 1:
            loss = 2 * loss
        if variant == "penalized_on_1" and is_odd and micro == 0:
            loss = loss + 0.01 * model.mix.weight.square().sum()
        if variant == "z_loss_on_1" and is_odd:
            loss = loss + 0.01 * logits.logsumexp(-1).square().mean()
        if variant == "entropy_on_1" and is_odd:
            loss = loss - 0.1 * torch.distributions.Categorical(logits=logits).entropy().mean()
        loss.backward()
    if variant == "gradient_doubled_on_1" and is_odd:
        for parameter in model.parameters():
            parameter.grad.mul_(2)
    if not ended and not (skips and step == 1):
        optimizer.step()
    optimizer.zero_grad()
"""


def judge(folder: Path, variant: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the case of report.json, and what was printed."""
    path, report = folder / "train.py", folder / "report.json"
    path.write_text(SCRIPT)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [sys.executable, "-m", "isoshard", "judge", "--report", str(report)]
    command += ["--precision", "native", "--", torchrun, "--nproc-per-node", "2", str(path)]
    result = subprocess.run(
        [*command, variant], capture_output=True, text=True, timeout=280, check=False
    )
    case = json.loads(report.read_text())["cases"][0] if report.exists() else {}
    return result.returncode, case, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("variant", "cause", "numbers"),
    [
        ("doubled_on_1", "loss_scaled_on_ranks", {"factors": [2.0]}),
        ("doubled_on_1_head_called_again", "loss_scaled_on_ranks", {"factors": [2.0]}),
        ("last_twice_on_1", "loss_weights_of_micro_batches", {}),
        ("smoothed_on_1", "loss_with_other_smoothing", {"smoothing": 0.2, "right": 0.0}),
        ("unmasked_on_1", "loss_of_other_tokens", {"fewer": 0}),
        ("shifted_on_1", "loss_of_other_labels", {}),
        ("bf16_on_1", "loss_rounded_on_ranks", {}),
        ("z_loss_on_1", "loss_penalizes_logits", {}),
        ("penalized_on_1", "loss_term_beside_output", {}),
        ("entropy_on_1", "loss_wrong_on_ranks", {}),
    ],
)
def test_the_rank_whose_loss_is_wrong_is_named(
    tmp_path: Path, variant: str, cause: str, numbers: dict[str, Any]
) -> None:
    code, case, said = judge(tmp_path, variant)

    first = case["findings"][0]
    assert (code, first["name"], first["cause"]["id"]) == (1, "loss", cause), said
    assert first["ranks"] == first["cause"]["numbers"]["ranks"] == [1]
    for name, number in numbers.items():
        assert first["cause"]["numbers"][name] == pytest.approx(number, abs=1e-3)


@pytest.mark.parametrize(
    "variant", ["right_token_mean", "right_mean_of_means", "right_other_loss", "skips_a_step"]
)
def test_a_right_loss_conforms(tmp_path: Path, variant: str) -> None:
    code, case, said = judge(tmp_path, variant)

    assert (code, case["status"]) == (0, "conforms"), said


def test_a_wrong_gradient_behind_a_right_loss_is_no_wrong_loss(tmp_path: Path) -> None:
    code, case, said = judge(tmp_path, "gradient_doubled_on_1")

    first = case["findings"][0]
    assert (code, first["kind"]) == (1, "grad"), said
    assert not first["cause"]["id"].startswith("loss_")


def test_a_step_that_one_rank_leaves_out_is_named(tmp_path: Path) -> None:
    code, case, said = judge(tmp_path, "skips_a_step_on_1")

    first = case["findings"][0]
    assert (code, first["finding"]["id"], first["step"]) == (1, "optimizer_steps_differ", 1), said
    assert first["ranks"] == [1]
    assert first["cause"]["id"] == "steps_of_ranks_differ"


def test_ranks_that_make_different_numbers_of_steps_diverge(tmp_path: Path) -> None:
    code, case, said = judge(tmp_path, "ends_early_on_1")

    first = case["findings"][0]
    assert (code, first["finding"]["id"], first["step"]) == (1, "optimizer_steps_differ", 1), said
