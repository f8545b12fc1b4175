# SPDX-License-Identifier: Apache-2.0
"""Sequence and loss parallelism of DTensor: right models conform, broken ones are found."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from live_models import LIVE, Blocks, Check, adamw, conforms, ids_of
from torch import nn

from isoshard import Divergence

pytestmark = LIVE
IDS = ids_of(8, 6)


class Model(Blocks):
    def __init__(self) -> None:
        super().__init__(16, 48, 54)
        self.norm = nn.LayerNorm(16)

    def last(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def sharded(model: nn.Module, mesh: Any, fault: str = "", loss: bool = False) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp
    from torch.distributed.tensor.parallel import loss as custom

    with contextlib.suppress(KeyError):
        custom._disable_custom_loss_ops()  # workers are kept
    if loss:
        custom._enable_custom_loss_ops()
    norm: Any = tp.SequenceParallel
    plan: dict[str, Any] = {
        "embed": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": norm(),
        "head": tp.ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss else Replicate(),
            use_local_output=not loss,
        ),
    }
    for i in range(2):
        plan[f"layers.{i}.norm"] = norm()
        plan[f"layers.{i}.up"] = tp.ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{i}.down"] = tp.RowwiseParallel(output_layouts=Shard(1))
    if fault == "norm beside the mesh":
        del plan["layers.1.norm"]  # its weight is a plain tensor, its input a part
    if fault == "no reduce-scatter":
        plan["layers.0.down"]._prepare_output_fn = _first_part
    if fault == "parts in another order":
        plan["layers.1.up"]._prepare_input_fn = _swapped
    if fault == "head of half the positions":
        plan["head"]._prepare_input_fn = _as_if_replicated
    tp.parallelize_module(model, mesh["tp"], plan)
    if fault == "vocabulary without its maximum":
        _patch_loss(model, custom)
    if "dp" in mesh.mesh_dim_names:
        fully_shard(model, mesh=mesh["dp"])
    if fault == "norm counted twice":
        model.norm.weight.register_hook(lambda grad: grad * mesh["tp"].size())


def _first_part(layouts: Any, use_local: bool, module: Any, outputs: Any, mesh: Any) -> Any:
    """Takes its own part of the sequence from the summand, and adds nothing."""
    return outputs.to_local().chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous()


def _swapped(layouts: Any, wanted: Any, module: Any, inputs: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    local = inputs[0].redistribute(placements=[Replicate()]).to_local().roll(1, 1)
    return (DTensor.from_local(local, mesh, (Replicate(),)),)


def _as_if_replicated(layouts: Any, wanted: Any, module: Any, inputs: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    local = torch.cat([inputs[0].to_local()] * mesh.size(), 1)
    return (DTensor.from_local(local, mesh, (Replicate(),)),)


def _patch_loss(model: nn.Module, custom: Any) -> None:
    """log_softmax over each rank's part of the vocabulary alone."""
    forward = model.forward

    def call(ids: torch.Tensor) -> torch.Tensor:
        reduce = custom.funcol.all_reduce
        custom.funcol.all_reduce = lambda tensor, *args, **kwargs: tensor
        try:
            return forward(ids)
        finally:
            custom.funcol.all_reduce = reduce

    model.forward = call  # type: ignore[method-assign]


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 3}])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_sequence_parallelism_conforms(
    isoshard_check: Check, mesh: dict[str, int], loss: bool, micro_batches: int
) -> None:
    parallelize = functools.partial(sharded, loss=loss)
    options = {"mesh": mesh, "batch": IDS, "optimizer": adamw, "micro_batches": micro_batches}
    report = conforms(isoshard_check, Model, parallelize, steps=2, **options)
    assert "module outputs        11 tensors" in report.text


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "norm beside the mesh",
            "first gradient of layers.1.norm.weight.*rank-local partial over tp",
        ),
        ("no reduce-scatter", "first forward at layers.0.down"),
        ("parts in another order", "first forward at layers.1.up"),
        ("head of half the positions", "first forward at head"),
        ("norm counted twice", r"first gradient of norm.weight.*scale 2 = tp"),
    ],
)
def test_a_broken_plan_is_found(isoshard_check: Check, mesh: str, fault: str, words: str) -> None:
    if fault == "norm counted twice":
        mesh = "tp=2"  # FSDP2 makes parameters of its own
    parallelize = functools.partial(sharded, fault=fault)
    with pytest.raises(Divergence, match=words):
        isoshard_check(Model, parallelize, mesh=mesh, batch=IDS, optimizer=adamw)


def test_a_loss_over_a_part_of_the_vocabulary_is_found(isoshard_check: Check) -> None:
    fault = "vocabulary without its maximum"
    parallelize = functools.partial(sharded, fault=fault, loss=True)
    with pytest.raises(Divergence, match="first loss .step 0."):
        isoshard_check(Model, parallelize, mesh="tp=2", batch=IDS, optimizer=adamw)
