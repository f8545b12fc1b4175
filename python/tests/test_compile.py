# SPDX-License-Identifier: Apache-2.0
"""Blocks that torch.compile runs, under DDP and FSDP2: recorded at their borders."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from live_models import LIVE, Blocks, Check, adamw, conforms, ids_of
from torch import nn

from isoshard import Divergence

pytestmark = LIVE
IDS = ids_of(8, 6)


def build() -> nn.Module:
    return Blocks(8, 16)


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


@pytest.mark.parametrize("how", ["in place", "wrapped"])
@pytest.mark.parametrize("data", ["ddp", "fsdp2"])
def test_compiled_blocks_conform(isoshard_check: Check, data: str, how: str) -> None:
    parallelize = functools.partial(compiled, data=data, how=how)
    options = {"mesh": "dp=2", "batch": IDS, "optimizer": adamw, "parallel_reference": True}
    report = conforms(isoshard_check, build, parallelize, steps=2, **options)
    assert "module outputs        4 tensors" in report.text  # embed, two blocks, head
    notes = " ".join(report.text.split())  # lines are wrapped
    assert "layers.0 is compiled: no hook inside it is called" in notes


def test_a_run_that_is_compiled_lacks_what_its_reference_records(isoshard_check: Check) -> None:
    options = {"mesh": "dp=2", "batch": IDS, "optimizer": adamw}
    with pytest.raises(Divergence, match="first forward at layers.0.norm .* by no rank"):
        isoshard_check(build, compiled, **options)
    inside = {f"{kind}/layers.*.*": "compiled" for kind in ("activation", "activation_grad")}
    assert isoshard_check(build, compiled, not_recorded=inside, **options).conforms


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
            build,
            functools.partial(compiled, data=data, how=how, fault=fault),
            mesh="dp=2",
            batch=IDS,
            optimizer=adamw,
            parallel_reference=True,
        )
