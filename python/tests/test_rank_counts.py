# SPDX-License-Identifier: Apache-2.0
"""Ranks that step, clear or sample otherwise than others are named, and right ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_user_scripts import judge

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
torch.manual_seed(0)
is_odd = rank == 1
by_hand = variant.startswith("by_hand")


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


model = Tagger()
wrapped = DistributedDataParallel(model) if world > 1 and not by_hand else model
if variant == "own_without_wrapper":
    wrapped = model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
size, length, pad = 8, 6, 0
data = torch.randint(1, 30, (3 * size, length))
tags = torch.randint(1, 30, (3 * size, length))
if variant.startswith("padded"):
    lengths = torch.tensor([3, 4, 2, 4, 6, 5, 1, 2]).repeat(3)
    is_pad = torch.arange(length) >= lengths[:, None]
    data, tags = data.masked_fill(is_pad, pad), tags.masked_fill(is_pad, -100)
    if variant == "padded_left":
        data, tags = data.flip(1), tags.flip(1)
if variant == "uneven_repeated":
    data = torch.cat([data[: size + 5], data[:1]])  # the sampler repeats the first sample
    tags = torch.cat([tags[: size + 5], tags[:1]])
    if world == 1:
        data, tags = data[:-1], tags[:-1]
if variant == "uneven_dropped":
    last = size + 5 if world == 1 else size + 4  # the sampler drops the last sample
    data, tags = data[:last], tags[:last]


def batch(step):
    if variant.startswith("own"):
        draws = torch.Generator().manual_seed(7 * step + rank)
        rows = torch.randint(len(data), (size,), generator=draws)
        return data[rows], tags[rows]
    x, y = data[step * size : (step + 1) * size], tags[step * size : (step + 1) * size]
    x, y = x[rank::world], y[rank::world]
    if variant == "filled" and world > 1:
        x, y = data[step * 7 : step * 7 + 7], tags[step * 7 : step * 7 + 7]
        x, y = torch.cat([x, x[:1]]), torch.cat([y, torch.full_like(y[:1], -100)])
        x, y = x[rank::world], y[rank::world]
    elif variant == "filled":
        x, y = data[step * 7 : step * 7 + 7], tags[step * 7 : step * 7 + 7]
    if variant == "by_hand_empty":
        if step == 1 and world > 1:  # the batch of one rank is empty
            x, y = data[size : 2 * size], tags[size : 2 * size]
        x, y = (x[:0], y[:0]) if is_odd and step == 1 else (x, y)
    if variant == "short" and is_odd:
        x, y = x[:3], y[:3]
    if variant == "cut" and is_odd:
        x, y = x[:, :-1], y[:, :-1]
    if variant == "cut_in_front" and is_odd:
        x, y = x[:, 2:], y[:, 2:]
    if variant == "padded_right" or variant == "padded_left":
        used = (x != pad).any(0)
        x, y = x[:, used], y[:, used]
    if variant == "padded_cut" and is_odd:
        x, y = x[:, :3], y[:, :3]
    return x.contiguous(), y.contiguous()


steps = 2 if variant in ("uneven_repeated", "uneven_dropped") else 3
for step in range(steps):
    x, y = batch(step)
    if len(x):
        loss = wrapped(x, y) * world / (size * length)
        loss.backward()
    if by_hand and world > 1:
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= world
    if variant == "cleared_on_one_rank" and is_odd:
        optimizer.zero_grad()
    if variant == "cleared_on_all_ranks" and world > 1:
        optimizer.zero_grad()
    if variant == "cleared_and_sent" and is_odd:
        optimizer.zero_grad()
    if variant == "step_on_first_rank" and is_odd:
        pass
    elif variant == "step_on_last_rank" and rank < world - 1:
        pass
    elif variant == "step_skipped" and is_odd and step == 0:
        pass
    elif variant == "step_once" and is_odd and step > 0:
        pass
    elif variant == "step_on_first_rank_and_sent" and is_odd:
        pass
    else:
        optimizer.step()
    if variant == "step_twice" and is_odd:
        optimizer.step()
    if variant == "step_after_clearing" and is_odd:
        optimizer.zero_grad()
        optimizer.step()
    if variant.endswith("_sent") and world > 1:
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    optimizer.zero_grad()
if variant == "pass_after_the_last_step":
    x, y = batch(0)
    wrapped(x, y).backward()
"""


@pytest.mark.parametrize(
    ("variant", "finding", "numbers", "place", "ranks"),
    [
        (
            "step_twice",
            "optimizer_steps_differ",
            {"rank": 1, "steps": 2, "other": 0, "other_steps": 1},
            ("param", "embed.weight", 0),
            [1],
        ),
        (
            "step_on_first_rank",
            "optimizer_steps_differ",
            {"rank": 1, "steps": 0, "other": 0, "other_steps": 1},
            ("param", "embed.weight", 0),
            [1],
        ),
        (
            "step_on_last_rank",
            "optimizer_steps_differ",
            {"rank": 0, "steps": 0, "other": 1, "other_steps": 1},
            ("param", "embed.weight", 0),
            [0],
        ),
        (
            "step_skipped",
            "optimizer_steps_differ",
            {"rank": 1, "steps": 0, "other": 0, "other_steps": 1},
            ("param", "embed.weight", 0),
            [1],
        ),
        (
            "step_once",
            "optimizer_steps_differ",
            {"rank": 1, "steps": 0, "other": 0, "other_steps": 1},
            ("param", "embed.weight", 1),
            [1],
        ),
        (
            "cleared_on_one_rank",
            "gradient_missing_on_rank",
            {"rank": 1, "other": 0},
            ("grad", "embed.weight", 0),
            [1],
        ),
        (
            "short",
            "samples_missing",
            {"missing": 1, "samples": 8},
            ("data_id", "input_ids", 0),
            [1],
        ),
        (
            "cut",
            "samples_shortened",
            {"rank": 1, "shortened": 4, "samples": 4, "length": 5, "whole": 6},
            ("data_id", "input_ids", 0),
            [1],
        ),
        (
            "cut_in_front",
            "samples_shortened",
            {"rank": 1, "shortened": 4, "samples": 4, "length": 4, "whole": 6},
            ("data_id", "input_ids", 0),
            [1],
        ),
        (
            "padded_cut",
            "samples_shortened",
            {"rank": 1, "shortened": 4, "samples": 4, "length": 3, "whole": 6},
            ("data_id", "input_ids", 0),
            [1],
        ),
        (
            "uneven_repeated",
            "samples_added",
            {"samples": 6, "added": 1},
            ("data_id", "input_ids", 1),
            [1],
        ),
    ],
)
def test_ranks_that_part_are_the_first_finding(
    tmp_path: Path,
    variant: str,
    finding: str,
    numbers: dict[str, int],
    place: tuple[str, str, int],
    ranks: list[int],
) -> None:
    code, case, said = judge(tmp_path, SCRIPT, variant)

    assert (code, case.get("status")) == (1, "diverges"), said
    first = case["findings"][0]
    assert (first["finding"]["id"], first["finding"]["numbers"]) == (finding, numbers)
    assert (first["kind"], first["name"], first["step"]) == place
    assert first["ranks"] == ranks
    assert len(case["findings"]) == 1, said


def test_ranks_may_part_in_the_first_step_that_is_recorded(tmp_path: Path) -> None:
    script = SCRIPT.replace("AdamW", "SGD")  # Adam's steps need all gradients before them

    code, case, said = judge(tmp_path, script, "short", "--at-steps", "1")

    assert (code, case.get("status")) == (1, "diverges"), said
    first = case["findings"][0]
    assert (first["finding"]["id"], first["step"]) == ("samples_missing", 1)


def test_replicas_that_train_apart_need_no_samples_of_the_reference(tmp_path: Path) -> None:
    code, case, said = judge(tmp_path, SCRIPT, "own_without_wrapper")

    assert (code, case.get("status")) == (1, "diverges"), said
    first = case["findings"][0]
    assert (first["finding"]["id"], first["kind"]) == ("replicas_differ", "grad")
    assert first["finding"]["numbers"]["distance"] > 0.5


@pytest.mark.parametrize(
    ("variant", "code"),
    [
        ("right", 0),
        ("by_hand", 0),
        ("pass_after_the_last_step", 0),
        ("own", 2),  # the single process must draw the samples of all ranks
        ("padded_right", 3),  # the single process pads to another length
        ("padded_left", 3),
        ("uneven_dropped", 3),
        ("filled", 3),  # a sample without labels fills the batches of all ranks
        ("by_hand_empty", 3),
        ("step_after_clearing", 3),
        ("step_on_first_rank_and_sent", 4),  # ranks that do not step have no state to compare
        ("cleared_and_sent", 4),
        ("cleared_on_all_ranks", 4),
    ],
)
def test_a_right_program_has_no_alarm(tmp_path: Path, variant: str, code: int) -> None:
    steps = ("--steps", "4") if variant == "pass_after_the_last_step" else ()
    found, case, said = judge(tmp_path, SCRIPT, variant, *steps)

    assert found == code, said
    assert case.get("status", "none") in ("conforms", "none"), said


@pytest.mark.parametrize("variant", ["padded_right", "uneven_dropped"])
def test_samples_that_may_be_right_get_advice(tmp_path: Path, variant: str) -> None:
    _, _, said = judge(tmp_path, SCRIPT, variant)

    wanted = {"padded_right": "(input_ids, step 0)", "uneven_dropped": "1 of its 5"}[variant]
    assert wanted in said
