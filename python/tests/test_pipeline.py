# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch.distributed.pipelining: right ones conform, broken ones are found."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import live_models
import pytest
import torch
import torch.distributed as dist
from live_models import LIVE, Check, conforms, ids_of, loss_of
from torch import nn

from isoshard import Divergence, IsoshardError, RunError

pytestmark = LIVE
IDS = ids_of(8, 6)
#: Schedules of two stages a rank here.
MANY = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


class Block(live_models.Block):
    def __init__(self) -> None:
        super().__init__(8, 16)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.act(self.up(self.norm(x)))))  # one module twice


def build() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 8), Block(), Block(), nn.Linear(8, 50))


def linears() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 50))


def fault_of(fault: str, stage: Any) -> None:
    """Plants a bug in the last of two stages, or in the first one."""
    if fault == "permuted" and stage.is_last:
        received = stage._retrieve_recv_activations

        def flipped(chunk: int) -> tuple[torch.Tensor, ...]:
            tensors = received(chunk)
            for tensor in tensors:
                tensor.data = tensor.data.flip(0)
            return tensors

        stage._retrieve_recv_activations = flipped
    if fault == "no gradient back" and stage.is_first:
        grads = stage._retrieve_recv_grads
        stage._retrieve_recv_grads = lambda chunk: tuple(x * 0 for x in grads(chunk))
    if fault == "lost micro-batch" and stage.is_last:
        backward = stage.backward_one_chunk

        def lossy(chunk: int, *args: Any, **kwargs: Any) -> None:
            kept = [None if p.grad is None else p.grad.clone() for p in stage.submod.parameters()]
            backward(chunk, *args, **kwargs)
            if chunk == 1:
                for parameter, grad in zip(stage.submod.parameters(), kept, strict=True):
                    parameter.grad = grad

        stage.backward_one_chunk = lossy
    if fault == "other weights" and stage.is_last:
        with torch.no_grad():
            next(stage.submod.parameters()).mul_(1.5)
    if fault == "not divided" and stage.is_first:
        stage.scale_grads = lambda factor: None
    if fault == "lost weights" and stage.is_last:
        weights = stage.backward_weight_one_chunk
        stage.backward_weight_one_chunk = lambda chunk, **kw: chunk == 1 or weights(chunk, **kw)


def say_nothing_to_itself(stage: Any) -> None:
    """Torch greets all neighbors. On a V one is on the own rank, where gloo has no way to."""
    greetings = stage._get_init_p2p_neighbors_ops
    stage._get_init_p2p_neighbors_ops = lambda: [
        op for op in greetings() if op.group_peer != stage.group_rank
    ]


def pipeline(
    model: nn.Module,
    mesh: Any,
    kind: str = "1F1B",
    data: str = "",
    fault: str = "",
    chunks: int = 4,
    shared_names: bool = False,
    scale_grads: bool = True,
) -> Any:
    from torch.distributed import pipelining
    from torch.distributed.fsdp import fully_shard

    pp, rank = mesh["pp"].size(), mesh["pp"].get_local_rank()
    many = kind in MANY
    count = 2 * pp if many else pp
    children = list(model.named_children())
    size = len(children) // count
    stages = []
    for index in (rank, count - 1 - rank) if "V" in kind else range(rank, count, pp):
        own = children[index * size : (index + 1) * size]
        part: Any = nn.Sequential(OrderedDict(own))
        if shared_names:
            part = nn.Sequential(*(module for _, module in own))
        if data == "ddp":
            part = nn.parallel.DistributedDataParallel(part, process_group=mesh.get_group("dp"))
        elif data == "fsdp2":
            fully_shard(part, mesh=mesh["dp"])
        elif data == "ddp of stage 0" and index == 0:
            part = nn.parallel.DistributedDataParallel(part, process_group=mesh.get_group("dp"))
        group = mesh.get_group("pp")
        stage = pipelining.PipelineStage(part, index, count, torch.device("cpu"), group=group)
        fault_of(fault, stage)
        say_nothing_to_itself(stage)
        stages.append(stage)
    schedule = getattr(pipelining, f"Schedule{kind}")
    loss: Any = loss_of
    if not scale_grads:
        loss = lambda logits, ids: loss_of(logits, ids) / chunks  # noqa: E731
    given = stages if many else stages[0]
    return schedule(given, n_microbatches=chunks, loss_fn=loss, scale_grads=scale_grads)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def frozen_on_the_last_stage(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    held = list(parameters)
    is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
    return torch.optim.AdamW(held[:1] if is_last else held, lr=1e-2)


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize(
    ("kind", "mesh", "data"),
    [
        ("GPipe", {"pp": 2}, ""),
        ("1F1B", {"pp": 2}, ""),
        ("Interleaved1F1B", {"pp": 2}, ""),
        ("1F1B", {"dp": 2, "pp": 2}, "ddp"),
        ("GPipe", {"pp": 2, "dp": 2}, "fsdp2"),
        ("Interleaved1F1B", {"dp": 2, "pp": 2}, "fsdp2"),
        ("InterleavedZeroBubble", {"pp": 2}, ""),
        ("ZBVZeroBubble", {"pp": 2}, ""),
        ("1F1B", {"pp": 4}, ""),
    ],
)
def test_a_pipeline_conforms(
    isoshard_check: Check, kind: str, mesh: dict[str, int], data: str, optimizer: Any
) -> None:
    report = conforms(
        isoshard_check,
        build,
        functools.partial(pipeline, kind=kind, data=data),
        mesh=mesh,
        batch=IDS,
        optimizer=optimizer,
        loss=loss_of,
        steps=2,
        max_grad_norm=0.5,
    )
    counts = ("loss ", "data ids              1 tensors", "module outputs        14 tensors")
    for words in (*counts, "activation gradients  14 tensors", "gradients             15 tensors"):
        assert words in report.text


def test_a_loss_that_divides_by_itself_conforms(isoshard_check: Check) -> None:
    parallelize = functools.partial(pipeline, scale_grads=False)
    isoshard_check(build, parallelize, mesh="pp=2", batch=IDS, optimizer=sgd, loss=loss_of)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("permuted", r"first forward at 2.norm \(step 0\).* on rank 1"),
        ("no gradient back", r"first gradient at 1.* on rank 0"),
        ("lost micro-batch", r"first gradient of 2.norm.weight \(step 0\).* on rank 1"),
        ("other weights", r"first weight as read 2.norm.weight \(step 0\).* on rank 1"),
        ("not divided", r"first gradient of 0.weight \(step 0\).* on rank 0.*scale 4"),
    ],
)
@pytest.mark.parametrize("kind", ["GPipe", "1F1B"])
def test_a_broken_stage_is_found(isoshard_check: Check, kind: str, fault: str, words: str) -> None:
    parallelize = functools.partial(pipeline, kind=kind, fault=fault)
    with pytest.raises(Divergence, match=words):
        isoshard_check(build, parallelize, mesh="pp=2", batch=IDS, optimizer=adamw, loss=loss_of)


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        ("Interleaved1F1B", "lost micro-batch", r"gradient of 3.weight \(step 0\).* on rank 1"),
        ("InterleavedZeroBubble", "lost weights", r"gradient of 3.weight \(step 0\).* on rank 1"),
        ("ZBVZeroBubble", "lost weights", r"gradient of 3.weight \(step 0\).* on rank 0"),
        ("ZBVZeroBubble", "other weights", r"weight as read 3.weight \(step 0\).* on rank 0"),
    ],
)
def test_a_broken_stage_of_several_on_a_rank_is_found(
    isoshard_check: Check, kind: str, fault: str, words: str
) -> None:
    parallelize = functools.partial(pipeline, kind=kind, fault=fault)
    with pytest.raises(Divergence, match="first " + words):
        isoshard_check(build, parallelize, mesh="pp=2", batch=IDS, optimizer=adamw, loss=loss_of)


def test_a_stage_without_data_parallelism_is_found(isoshard_check: Check) -> None:
    parallelize = functools.partial(pipeline, data="ddp of stage 0")
    with pytest.raises(Divergence, match=r"first gradient of 2.norm.weight.*rank-local over dp"):
        isoshard_check(
            build, parallelize, mesh="dp=2,pp=2", batch=IDS, optimizer=adamw, loss=loss_of
        )


def test_weights_of_a_stage_that_are_not_stepped_are_found(isoshard_check: Check) -> None:
    with pytest.raises(Divergence, match=r"optimizer state 2.norm.bias.* was recorded by no rank"):
        isoshard_check(
            build,
            pipeline,
            mesh="pp=2",
            batch=IDS,
            optimizer=frozen_on_the_last_stage,
            loss=loss_of,
        )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("1F1B", "must belong to one stage of a pipeline, got param/0.weight"),
        ("Interleaved1F1B", "must have parameters with names of their own, got 0.weight"),
    ],
)
def test_stages_whose_names_are_not_the_models_are_refused(
    isoshard_check: Check, kind: str, words: str
) -> None:
    parallelize = functools.partial(pipeline, kind=kind, shared_names=True)
    with pytest.raises(IsoshardError, match=words):
        isoshard_check(linears, parallelize, mesh="pp=2", batch=IDS, optimizer=sgd, loss=loss_of)


def as_data_parallel(model: nn.Module, mesh: Any) -> Any:
    return pipeline(model, _Renamed(mesh))


class _Renamed:
    """A mesh whose axis dp is called pp, as where a script's --mesh is wrong."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def __getitem__(self, name: str) -> Any:
        return self.mesh["dp"]

    def get_group(self, name: str) -> Any:
        return self.mesh.get_group("dp")


def test_a_mesh_without_the_pipelines_axis_is_refused(isoshard_check: Check) -> None:
    with pytest.raises(RunError, match="axis pp of the mesh must hold the ranks of a pipeline"):
        isoshard_check(build, as_data_parallel, mesh="dp=2", batch=IDS, optimizer=sgd, loss=loss_of)
