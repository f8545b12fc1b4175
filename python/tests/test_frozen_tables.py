# SPDX-License-Identifier: Apache-2.0
"""Frozen tables of 16 bits in a model in fp32: they make its tolerances no wider."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import isoshard
from isoshard import Divergence, Report

Check = Callable[..., Report]
IDS = torch.randint(0, 50, (8, 7), generator=torch.Generator().manual_seed(1))


@torch.compile(backend="eager")
def _compiled(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return table[ids] + table[ids]


class Model(nn.Module):
    """In fp32, with a parameter in bf16 that `read` uses."""

    def __init__(self, read: str, trains: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 16).bfloat16(), requires_grad=trains)
        self.embed = nn.Embedding(50, 16)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 50)
        self.read = READS[read]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) + self.read(self.table, ids).float()
        logits = self.head(hidden + self.down(torch.relu(self.up(hidden))))
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


COPIES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda table, ids: functional.embedding(ids, table),
    "index": lambda table, ids: table[ids],
    "index_select": lambda table, ids: table.index_select(0, ids.flatten()).view(*ids.shape, -1),
    "gather": lambda table, ids: table.expand(len(ids), -1, -1).gather(
        1, ids[..., None].expand(-1, -1, 16)
    ),
    "positions": lambda table, ids: table[: ids.shape[1]].float(),
}
COMPUTES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "compiled": lambda table, ids: _compiled(table, ids),
    "mapped": lambda table, ids: torch.vmap(lambda i: 2 * table.index_select(0, i))(ids),
    "doubled": lambda table, ids: table[ids] + table[ids + 0],
    "in place": lambda table, ids: table[ids].clone().mul_(0.3),
    "whole": lambda table, ids: functional.one_hot(ids, 50).float() @ table.float(),
    "rounded": lambda table, ids: (table[ids].float() * 0.3).bfloat16(),
}
READS = {**COPIES, **COMPUTES}


def ddp(model: nn.Module, mesh: Any, factor: float = 1.0) -> nn.Module:
    if factor != 1.0:
        model.down.weight.register_hook(lambda gradient: gradient * factor)
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


def judging(check: Check, folder: Path, read: str, *, trains: bool, steps: int) -> dict[str, Any]:
    """What a right run's reference says about how others are judged."""
    build = functools.partial(Model, read, trains)
    report = check(build, ddp, mesh="dp=2", batch=IDS, optimizer=adamw, steps=steps, keep=folder)
    assert report.conforms, report.text
    manifest = json.loads((folder / "reference" / "manifest.json").read_text())
    said: dict[str, Any] = manifest["settings"]["judging"]
    return said


@pytest.mark.parametrize("read", COPIES)
def test_a_frozen_table_hides_no_factor(
    isoshard_check: Check, tmp_path: Path, read: str
) -> None:
    assert judging(isoshard_check, tmp_path, read, trains=False, steps=2)["coarsest_dtype"] == "fp32"

    build = functools.partial(Model, read, False)
    wrong = functools.partial(ddp, factor=1.001)
    with pytest.raises(Divergence, match="first gradient of down.weight"):
        isoshard_check(build, wrong, mesh="dp=2", batch=IDS, optimizer=adamw, steps=2)


@pytest.mark.parametrize(
    ("read", "trains"), [*((name, False) for name in COMPUTES), ("index", True)]
)
def test_what_is_rounded_to_16_bits_is_allowed_for(
    isoshard_check: Check, tmp_path: Path, read: str, trains: bool
) -> None:
    assert "coarsest_dtype" not in judging(isoshard_check, tmp_path, read, trains=trains, steps=1)


def test_no_mode_stays_after_a_recording(tmp_path: Path) -> None:
    model = Model("index", False)
    optimizer = adamw(model.parameters())
    with isoshard.record(tmp_path / "run", model, optimizer, steps=1):
        for _ in range(3):
            model(IDS).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert torch.overrides._get_current_function_mode_stack() == []
