# SPDX-License-Identifier: Apache-2.0
"""Blocks that torch.compile runs, under DDP and FSDP2: recorded at their borders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from isoshard import Divergence, Report

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("judge_program")]
IDS = torch.randint(0, 50, (8, 6), generator=torch.Generator().manual_seed(1))
Check = Callable[..., Report]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def compiled(
    model: Any, mesh: Any, data: str = "ddp", how: str = "in place", fault: str = ""
) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    is_run = mesh.size() > 1
    if fault == "another constant" and is_run:
        model.layers[1].scale = 1.01
    for i, layer in enumerate(model.layers):
        if how == "in place":
            layer.compile(backend="aot_eager")
        elif how == "wrapped":
            model.layers[i] = torch.compile(layer, backend="aot_eager")
    if data == "ddp":
        if fault == "not reduced" and is_run:
            return model
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    if fault == "not reduced" and is_run:
        model.layers[1].set_requires_gradient_sync(False)
    if fault == "other weights" and is_run and mesh.get_rank() == 1:
        with torch.no_grad():
            model.layers[0].up.bias.to_local().add_(1)
    return model


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize("data", ["ddp", "fsdp2"])
def test_compiled_blocks_conform(isoshard_check: Check, data: str, how: str) -> None:
    report = isoshard_check(
        Model,
        functools.partial(compiled, data=data, how=how),
        mesh="dp=2",
        batch=IDS,
        optimizer=adamw,
        steps=2,
        parallel_reference=True,
    )
    assert report.verdict.startswith("CONFORMS (within tolerance)")
    assert "module outputs        4 tensors" in report.text  # embed, two blocks, head
    assert "layers.0 is compiled: no hook inside it is called" in report.text


def test_a_run_that_is_compiled_lacks_what_its_reference_records(isoshard_check: Check) -> None:
    options = {"mesh": "dp=2", "batch": IDS, "optimizer": adamw}
    with pytest.raises(Divergence, match="first forward at layers.0.norm .* by no rank"):
        isoshard_check(Model, compiled, **options)
    inside = {f"{kind}/layers.*.*": "compiled" for kind in ("activation", "activation_grad")}
    assert isoshard_check(Model, compiled, not_recorded=inside, **options).conforms


@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize(
    ("data", "fault", "words"),
    [
        ("ddp", "not reduced", "rank-local over dp"),
        ("ddp", "another constant", r"first forward at layers.1 \(step 0\)"),
        ("fsdp2", "not reduced", "first gradient of layers.1.norm.weight"),
        ("fsdp2", "other weights", "first weight as read layers.0.up.bias"),
    ],
)
def test_a_bug_inside_is_found_at_the_border(
    isoshard_check: Check, data: str, how: str, fault: str, words: str
) -> None:
    with pytest.raises(Divergence, match=words):
        isoshard_check(
            Model,
            functools.partial(compiled, data=data, how=how, fault=fault),
            mesh="dp=2",
            batch=IDS,
            optimizer=adamw,
            parallel_reference=True,
        )
