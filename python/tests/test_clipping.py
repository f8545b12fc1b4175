# SPDX-License-Identifier: Apache-2.0
"""Scripts that clip their gradients themselves, between backward and the optimizer's step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = """\
import math, os, sys
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
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
is_wrapped = world > 1 and not variant.startswith("reduced_by_hand")
model = DistributedDataParallel(net) if is_wrapped else net
trained = list(net.parameters())
if variant == "second_optimizer_alone":
    body = torch.optim.SGD(trained[:2], lr=0.1)
    trained = trained[2:]
optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False)
inputs, labels = torch.randn(96, 6), torch.randint(0, 3, (96,))
MAX_NORM, is_second = 0.1, rank == 1


def gradients():
    return [p.grad for p in net.parameters()]


def clip(limit=MAX_NORM, norm_of=gradients):
    norm = torch.sqrt(sum(g.pow(2).sum() for g in norm_of()))
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for g in gradients():
        g.mul_(factor)


def clip_in_python(limit=MAX_NORM):
    norm = torch.cat([g.flatten() for g in gradients()]).norm().item()
    if norm > limit:
        for p in net.parameters():
            p.grad = p.grad * (limit / norm)


def reduce_by_hand():
    if variant == "reduced_by_hand_after_log":
        print("own norm", torch.stack([g.norm() for g in gradients()]).norm().item())
    if variant == "reduced_by_hand_as_one":
        flat = torch.cat([g.flatten() for g in gradients()])
        if world > 1:
            dist.all_reduce(flat)
            flat /= world
        for g, part in zip(gradients(), flat.split([g.numel() for g in gradients()])):
            g.copy_(part.view_as(g))
        return
    for g in gradients():
        g /= world
        if world > 1:
            dist.all_reduce(g)


for step in range(4):
    for micro in range(2):
        n = 8 // world
        first = step * 16 + micro * 8 + rank * n
        x, y = inputs[first : first + n], labels[first : first + n]
        loss = F.cross_entropy(model(x), y)
        (loss * n * world if variant == "divided_by_tokens" else loss / 2).backward()
    if variant.startswith("reduced_by_hand"):
        reduce_by_hand()
        clip()
    if variant == "divided_by_tokens":
        for g in gradients():
            g.div_(16)
        clip()
    if variant == "by_norm" or (variant == "left_out_on_rank_1" and not is_second):
        clip()
    if variant == "never_bites":
        clip(1e6)
    if variant == "in_python" or (variant == "left_out_of_ranks" and world == 1):
        clip_in_python()
    if variant == "foreach":
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients())))
        torch._foreach_mul_(gradients(), (MAX_NORM / norm).clamp(max=1.0))
    if variant in ("by_value", "by_other_value_on_rank_1"):
        limit = 0.004 if is_second and variant != "by_value" else 0.01
        for p in net.parameters():
            p.grad.data.clamp_(-limit, limit)
    if variant == "by_value_of_torch":
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
    if variant == "to_half_on_rank_1":
        clip(MAX_NORM / 2 if is_second else MAX_NORM)
    if variant == "norm_without_head_on_rank_1":
        clip(norm_of=lambda: gradients()[:-2] if is_second else gradients())
    if variant == "norm_over_ranks":
        square = sum(g.square().sum() for g in gradients())
        if world > 1:
            dist.all_reduce(square)
        for g in gradients():
            g *= torch.clamp(MAX_NORM / square.sqrt(), max=1.0)
    if variant == "logged_before_the_mean":
        for g in gradients() if world > 1 else ():
            g *= world  # the ranks' sum
        print("norm", torch.stack([g.norm() for g in gradients()]).norm().item() / world)
        for g in gradients():
            g /= world
    if variant == "logged_on_first_rank_and_scaled":
        if rank == 0:
            print("norm", torch.stack([g.norm() for g in gradients()]).norm().item())
        for g in gradients():
            g *= 0.0123
    if variant == "norm_of_parts_in_python":
        own = torch.cat([g.flatten() for g in gradients()[rank::world]]).norm().item()
        square = torch.tensor(own**2, dtype=torch.float64)
        if world > 1:
            dist.all_reduce(square)
        for g in gradients():
            g.mul_(min(1.0, MAX_NORM / math.sqrt(float(square))))
    if variant == "second_optimizer_alone":
        body.step()
        head = gradients()[2:]
        norm = torch.stack([g.norm() for g in head]).norm()
        for g in head:
            g.mul_(MAX_NORM / 2 / norm)
    if variant == "by_torch_and_zeroed_on_rank_1":
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        if is_second:
            net[0].weight.grad.zero_()
    optimizer.step()
    net.zero_grad()
"""

#: Gradients are sums over ranks until the optimizer reads them.
_PARTIAL = """\
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
net = nn.Linear(8, 4)
for name, parameter in list(net.named_parameters()):
    setattr(net, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [Replicate()])))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    inputs = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    net(inputs).square().sum().full_tensor().backward()
    if sys.argv[1] == "on_rank_1" and rank == 1:
        for parameter in net.parameters():
            parameter.grad.to_local().clamp_(-0.001, 0.001)
    optimizer.step()
    optimizer.zero_grad()
"""


def judge(folder: Path, variant: str, script: str = _SCRIPT) -> tuple[int, dict[str, Any], str]:
    """Exit code, the case of report.json, and what was printed."""
    path, report = folder / "train.py", folder / "report.json"
    path.write_text(script)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [sys.executable, "-m", "isoshard", "judge", "--report", str(report)]
    command += ["--precision", "native", "--no-closer-look"]
    command += ["--output-dir", str(folder / "runs")]
    command += ["--", torchrun, "--nproc-per-node", "2", str(path), variant]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    case = json.loads(report.read_text())["cases"][0] if report.exists() else {}
    return result.returncode, case, result.stdout + result.stderr


def gradients_of(folder: Path, run: str) -> set[str]:
    """The names of the gradients that rank 0 has recorded in step 0."""
    file = folder / "runs" / run / "step0000" / "rank00000.json"
    records = json.loads(file.read_text())["records"]
    return {record["name"] for record in records if record["kind"] == "grad"}


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(
    ("variant", "is_clipped"),
    [
        ("none", False),
        ("never_bites", False),
        ("by_norm", True),
        ("in_python", True),
        ("foreach", True),
        ("by_value", True),
        ("by_value_of_torch", True),
        ("divided_by_tokens", True),
        ("reduced_by_hand", True),
        ("reduced_by_hand_as_one", True),
        ("reduced_by_hand_after_log", True),
        ("logged_before_the_mean", False),
        ("logged_on_first_rank_and_scaled", False),
        ("norm_of_parts_in_python", True),
        ("second_optimizer_alone", True),
    ],
)
def test_right_clipping_conforms(tmp_path: Path, variant: str, is_clipped: bool) -> None:
    code, case, said = judge(tmp_path, variant)

    assert (code, case["status"]) == (0, "conforms"), said
    for run in ("reference", "run"):
        names = gradients_of(tmp_path, run)
        assert ("0.weight.clipped" in names) == is_clipped
        assert "0.weight" in names


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(
    ("variant", "stage", "ranks", "cause"),
    [
        ("norm_without_head_on_rank_1", "grad norm", [1], "norm_squares_left_out"),
        ("norm_over_ranks", "grad norm", [0, 1], "number_off"),
        ("to_half_on_rank_1", "clipped gradient", [1], "scale_of_formula"),
        ("left_out_on_rank_1", "grad norm", [1], "clipping_not_applied"),
        ("left_out_of_ranks", "grad norm", [], "clipping_not_applied"),
        ("by_other_value_on_rank_1", "clipped gradient", [1], None),
        ("by_torch_and_zeroed_on_rank_1", "clipped gradient", [1], None),
    ],
)
def test_wrong_clipping_is_named_where_it_happens(
    tmp_path: Path, variant: str, stage: str, ranks: list[int], cause: str | None
) -> None:
    code, case, said = judge(tmp_path, variant)

    first = case["findings"][0]
    assert (code, first["stage"], first["step"], first["ranks"]) == (1, stage, 0, ranks), said
    if cause is not None:
        assert first["cause"]["id"] == cause, said


@pytest.mark.usefixtures("judge_program")
def test_the_line_that_clips_is_named(tmp_path: Path) -> None:
    _, case, said = judge(tmp_path, "to_half_on_rank_1")

    (line,) = (i for i, text in enumerate(_SCRIPT.splitlines(), 1) if "g.mul_(factor)" in text)
    assert f"train.py:{line}" in said, case


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(("variant", "status"), [("right", "conforms"), ("on_rank_1", "diverges")])
def test_one_rank_may_clip_its_part_of_a_sum(tmp_path: Path, variant: str, status: str) -> None:
    _, case, said = judge(tmp_path, variant, _PARTIAL)

    assert case.get("status") == status, said
