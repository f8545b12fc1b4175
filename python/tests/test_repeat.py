# SPDX-License-Identifier: Apache-2.0
"""The reference is run twice and must have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_judge import judge
from torch import nn

import isoshard
from isoshard import RunError

pytestmark = pytest.mark.usefixtures("judge_program")

_SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed({seed})
noise = torch.Generator().manual_seed({noise})
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.randn(4, 8, 16, generator=torch.Generator().manual_seed({data})):
    part = x.chunk(world)[rank]
    loss = nn.functional.mse_loss(model(part), part.flip(1))
    (loss * (1 + 1e-4 * torch.rand((), generator=noise))).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
_OTHER = "int.from_bytes(os.urandom(4), 'little')"


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({}, None),
        ({"seed": _OTHER}, "param"),
        ({"data": _OTHER}, "data_id"),
        ({"noise": _OTHER}, "scalar loss"),
    ],
    ids=["right", "weights", "data", "noise"],
)
def test_a_reference_that_does_not_repeat_is_refused(
    tmp_path: Path, changed: dict[str, str], first: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.format(**{"seed": 0, "noise": 1, "data": 2, **changed}))
    code, text = judge(script, 2, options=("--precision", "native"))
    if first is None:
        assert code == 0, text
        return
    assert code == 4, text
    assert f"must repeat bit by bit, got another {first}" in text


def _noisy() -> nn.Module:
    torch.seed()
    return nn.Linear(4, 4)


def _plain() -> nn.Module:
    return nn.Linear(4, 4)


def _ddp(model: nn.Module, mesh: object) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def _square(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return (output - batch).square().mean()


def test_check_refuses_a_model_that_is_built_another_way_each_time() -> None:
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    common = {"mesh": {"dp": 2}, "batch": batch, "optimizer": _sgd, "loss": _square}
    assert isoshard.check(_plain, _ddp, precision="native", **common).conforms
    with pytest.raises(RunError, match="must repeat bit by bit"):
        isoshard.check(_noisy, _ddp, precision="native", **common)
