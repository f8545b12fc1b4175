# SPDX-License-Identifier: Apache-2.0
"""What scripts contain besides a model: buffers, labels to ignore, collectives of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("judge_program")

_BEGIN = """\
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
"""

BUFFERS = (
    _BEGIN
    + """\
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.linspace(1, 2, 8), persistent=False)

    def forward(self, x):
        return self.down(self.up(x) * self.scale)


model = Scaled()
if variant == "other_on_rank_1" and rank == 1:
    model.scale.mul_(3)
if variant == "other_on_rank_1_and_unused" and rank == 1:
    model.register_buffer("spare", torch.ones(3), persistent=False)
elif variant == "other_on_rank_1_and_unused":
    model.register_buffer("spare", torch.zeros(3), persistent=False)
wrapped = DistributedDataParallel(model, broadcast_buffers=False) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 6), torch.randn(8, 2)
x, y = x.chunk(world)[rank], y.chunk(world)[rank]
for _ in range(2):
    F.mse_loss(wrapped(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

LABELS = (
    _BEGIN
    + """\
model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
wrapped = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids, labels = torch.randint(0, 20, (8, 6)), torch.randint(0, 20, (8, 6))
lengths = torch.tensor([6, 1, 5, 2, 3, 4, 1, 2])
labels[torch.arange(6)[None] >= lengths[:, None]] = -1
micro_batches = int(variant)
for _ in range(2):
    for i in range(micro_batches):
        x, y = (t.chunk(micro_batches)[i].chunk(world)[rank] for t in (ids, labels))
        loss = F.cross_entropy(wrapped(x).flatten(0, 1), y.flatten(), ignore_index=-1)
        (loss / micro_batches).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

UNREAD = (
    _BEGIN
    + """\
class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.t().contiguous().t()
        if world > 1 and variant == "reduces_a_copy":
            dist.all_reduce(gradient.contiguous())
        elif world > 1:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient)
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) @ Reduce.apply(self.weight)))


model = Model()
for name, parameter in model.named_parameters():
    if world > 1 and name != "weight":
        parameter.register_hook(lambda g: (dist.all_reduce(g), g)[1])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 6), torch.randn(8, 2)
x, y = x.chunk(world)[rank], y.chunk(world)[rank]
for _ in range(2):
    (F.mse_loss(model(x), y) / world).backward()
    optimizer.step()
    optimizer.zero_grad()
    if world > 1:
        dist.all_reduce(torch.zeros(1))  # ranks wait for each other
"""
)


#: A loss that enters in backward only, and that ranks must scale by their number.
AUXILIARY = (
    _BEGIN
    + """\
class Auxiliary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.tensor(1.0 if variant == "not_scaled" else float(world))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.out = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x):
        logits = self.router(x)
        loss = logits.logsumexp(-1).square().sum() / 8
        return self.out(Auxiliary.apply(logits.softmax(-1), loss))


model = nn.Sequential(nn.Linear(6, 6), Moe())
wrapped = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 6), torch.randn(8, 2)
x, y = x.chunk(world)[rank], y.chunk(world)[rank]
for _ in range(2):
    F.mse_loss(wrapped(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


#: A layer, or samples' length, that ranks do not have alike.
SKIPPED = (
    _BEGIN
    + """\
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = self.first(x)
        if variant != "layer_skipped_on_rank_1" or rank == 0:
            x = torch.tanh(self.second(x))
        return self.last(x)


model = Layers()
wrapped = model
if world > 1:
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 5, 6), torch.randn(8, 5, 2)
x[4:, 3:], y[4:, 3:] = 0, 0
x, y = x.chunk(world)[rank], y.chunk(world)[rank]
if variant == "shorter_on_rank_1" and rank == 1:
    x, y = x[:, :3], y[:, :3]
for _ in range(2):
    lengths = torch.tensor([5, 3]) if world > 1 else torch.tensor([5] * 4 + [3] * 4)
    weights = (torch.arange(x.shape[1]) < (lengths[rank] if world > 1 else lengths[:, None]))
    error = (wrapped(x) - y).square().mean(-1) * weights
    (error.sum() * world / 32).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


#: Much of what training scripts contain beside a model and an optimizer.
CONTENTS = (
    _BEGIN
    + """\
import copy


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(10, 16), nn.GELU()), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.head(self.body(x)) * self.scale


def evaluate():
    model.eval()
    with torch.no_grad():
        model(validation)
    model.train()


net = Net()
model = DistributedDataParallel(net) if world > 1 else net
teacher, average = (copy.deepcopy(net).requires_grad_(False) for _ in range(2))
matrices = [p for p in net.parameters() if p.ndim > 1]
others = [p for p in net.parameters() if p.ndim <= 1]
optimizers = [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.Adam(others, lr=1e-2)]
warm_up = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: min(1, i / 2)) for o in optimizers]
scaler = torch.amp.GradScaler("cpu", enabled=variant == "scaler")
inputs, labels, validation = torch.randn(64, 10), torch.randint(0, 4, (64,)), torch.randn(8, 10)
evaluate()
for step in range(5):
    x, y = (t[step * 8 : step * 8 + 8].chunk(world)[rank] for t in (inputs, labels))
    with torch.no_grad():
        wanted = teacher(x)
    first, second = model(x), model(x + 0.1)
    loss = F.cross_entropy(first, y) + F.mse_loss(second, wanted)
    if variant == "loss_of_rank_1_doubled" and rank == 1:
        loss = loss * 2
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    if variant == "clip_by_value":
        nn.utils.clip_grad_value_(net.parameters(), 0.05)
    else:
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for optimizer, schedule in zip(optimizers, warm_up):
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), net.parameters()):
            mean.lerp_(parameter, 0.1)
    evaluate()
"""
)


def judge(
    folder: Path, script: str, variant: str, *options: str
) -> tuple[int, dict[str, Any], str]:
    """Exit code, the case of report.json, and what was printed."""
    path, report = folder / "train.py", folder / "report.json"
    path.write_text(script)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [sys.executable, "-m", "isoshard", "judge", "--report", str(report), *options]
    command += ["--precision", "native", "--", torchrun, "--nproc-per-node", "2", str(path)]
    result = subprocess.run(
        [*command, variant], capture_output=True, text=True, timeout=280, check=False
    )
    case = json.loads(report.read_text())["cases"][0] if report.exists() else {}
    return result.returncode, case, result.stdout + result.stderr


def line_of(script: str, text: str) -> str:
    """FILE:LINE of the line of the script that holds a text."""
    (number,) = (i for i, line in enumerate(script.splitlines(), 1) if text in line)
    return f"train.py:{number}"


def test_a_buffer_that_differs_is_the_first_tensor(tmp_path: Path) -> None:
    code, case, said = judge(tmp_path, BUFFERS, "other_on_rank_1")

    first = case["findings"][0]
    assert (code, first["finding"]["id"], first["name"]) == (1, "buffer_differs", "scale"), said
    assert first["ranks"] == [1]


@pytest.mark.parametrize("variant", ["right", "other_on_rank_1_and_unused"])
def test_a_buffer_that_changes_nothing_is_not_judged(tmp_path: Path, variant: str) -> None:
    code, case, said = judge(tmp_path, BUFFERS, variant)

    assert (code, case["status"]) == (0, "conforms"), said


def test_a_mean_of_the_ranks_means_is_named(tmp_path: Path) -> None:
    """The labels are no input of the model, -1 is ignored, and there are two micro-batches."""
    code, case, said = judge(tmp_path, LABELS, "2")

    first = case["findings"][0]
    assert (code, first["kind"]) == (1, "scalar"), said
    assert first["cause"]["id"] == "mean_of_own_labels"
    assert first["cause"]["numbers"] == {"least": 10, "most": 14}


def test_with_one_micro_batch_logits_show_the_mean_of_means(tmp_path: Path) -> None:
    code, case, said = judge(tmp_path, LABELS, "1")

    first = case["findings"][0]
    assert (code, first["cause"]["id"]) == (1, "mean_of_means"), said


def test_a_collective_whose_result_nobody_reads_is_named(tmp_path: Path) -> None:
    code, case, said = judge(tmp_path, UNREAD, "reduces_a_copy", "--loss", "sum")

    first = case["findings"][0]
    assert (code, first["kind"], first["name"]) == (1, "grad", "weight"), said
    line = line_of(UNREAD, "dist.all_reduce(gradient.contiguous())")
    assert [line in note for note in case["notes"]].count(True) == 1, case["notes"]


def test_a_collective_whose_result_is_read_is_not_named(tmp_path: Path) -> None:
    """Nor is one of a single number, by which ranks wait for each other."""
    code, case, said = judge(tmp_path, UNREAD, "right", "--loss", "sum")

    assert (code, case["status"]) == (0, "conforms"), said
    assert not [note for note in case["notes"] if "train.py:" in note]


def test_the_line_that_made_the_first_wrong_tensor_is_named(tmp_path: Path) -> None:
    """Here of the module's call in forward, and of the call that begins backward."""
    broken = BUFFERS.replace("self.up(x) * self.scale", "self.up(x * (1 + rank)) * self.scale")
    code, case, said = judge(tmp_path, broken, "right")
    assert (code, case["findings"][0]["name"]) == (1, "up"), said
    assert case["findings"][0]["call_site"] == line_of(broken, "self.up(x * (1 + rank))")

    broken = BUFFERS.replace("y).backward()", "y).mul(2 if world > 1 else 1).backward()")
    code, case, said = judge(tmp_path, broken, "right")
    assert (code, case["findings"][0]["kind"]) == (1, "scalar"), said
    assert case["findings"][0]["call_site"] == line_of(broken, "F.mse_loss(wrapped(x), y)")


def test_a_closer_look_names_the_part_of_a_gradient_that_is_scaled(tmp_path: Path) -> None:
    """Of the two parts of the router's gradient only that of the auxiliary loss is."""
    assert judge(tmp_path, AUXILIARY, "scaled")[0] == 0
    code, case, said = judge(tmp_path, AUXILIARY, "not_scaled")

    first = case["findings"][0]
    assert (code, first["name"], first["cause"]["id"]) == (1, "1.router", "function_wrong"), said
    assert line_of(AUXILIARY, "logits.logsumexp") in first["cause"]["words"]["tensor"]
    assert "scale 0.5" in first["cause"]["words"]["cause"]


def test_records_that_fit_no_layout_do_not_hide_what_diverges(tmp_path: Path) -> None:
    """Rank 1 has no forward at `second`, and so half of the reference's."""
    code, case, said = judge(tmp_path, SKIPPED, "layer_skipped_on_rank_1")

    first = case["findings"][0]
    assert (code, first["kind"], first["name"]) == (1, "activation", "last"), said
    assert any("activation/second" in note for note in case["notes"]), case["notes"]


def test_a_right_run_with_records_that_fit_no_layout_has_no_verdict(tmp_path: Path) -> None:
    """Rank 1 pads its samples to a shorter length, which changes no result."""
    code, case, said = judge(tmp_path, SKIPPED, "shorter_on_rank_1")
    assert (code, case) == (3, {}), said

    code, _, said = judge(tmp_path, SKIPPED, "right")
    assert code == 0, said


@pytest.mark.parametrize("variant", ["clip_by_norm", "clip_by_value", "scaler"])
def test_what_scripts_usually_contain_conforms(tmp_path: Path, variant: str) -> None:
    """Two optimizers, a warm-up from 0, two passes before one backward, evaluations, a mean."""
    code, case, said = judge(tmp_path, CONTENTS, variant, "--steps", "3")

    assert (code, case["status"]) == (0, "conforms"), said


def test_a_mistake_among_it_is_found(tmp_path: Path) -> None:
    code, case, said = judge(tmp_path, CONTENTS, "loss_of_rank_1_doubled", "--steps", "3")

    assert (code, case["findings"][0]["name"]) == (1, "loss"), said
