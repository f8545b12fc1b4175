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


def wrapped(
    model: Any, mesh: Any, how: tuple[str, ...] = (), inside: tuple[str, ...] = (), fault: str = ""
) -> Any:
    """The model in these wrappers, from the innermost to the outermost; so its blocks."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()

    def wrap(module: Any, what: str) -> Any:
        if what == "ddp":
            if fault == "not reduced" and mesh.size() > 1:
                return module
            return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("dp"))
        if what == "fsdp2":
            return fully_shard(module, mesh=mesh["dp"])
        if what == "compile":
            return torch.compile(module, backend="aot_eager")
        return checkpoint_wrapper(module)

    for what in inside:
        for i, layer in enumerate(model.layers):
            model.layers[i] = wrap(layer, what)
    return functools.reduce(wrap, how, model)


ORDERS = [
    (("ddp", "compile"), ()),
    (("ddp", "checkpoint", "compile"), ()),
    (("compile", "ddp"), ("checkpoint",)),
    (("fsdp2", "compile"), ("fsdp2",)),
    (("compile", "fsdp2"), ("checkpoint", "fsdp2")),
    (("checkpoint", "ddp"), ("compile",)),
]


@pytest.mark.parametrize(("how", "inside"), ORDERS, ids=[".".join(h + i) for h, i in ORDERS])
def test_wrappers_conform_in_any_order(
    isoshard_check: Check, how: tuple[str, ...], inside: tuple[str, ...]
) -> None:
    parallelize = functools.partial(wrapped, how=how, inside=inside)
    options = {"mesh": "dp=2", "batch": IDS, "optimizer": adamw, "parallel_reference": True}
    conforms(isoshard_check, build, parallelize, **options)


@pytest.mark.parametrize(
    ("how", "inside"),
    [(("ddp", "checkpoint"), ()), (("checkpoint", "fsdp2"), ("fsdp2",)), ((), ("ddp",))],
)
def test_names_are_those_of_the_model_without_wrappers(
    isoshard_check: Check, how: tuple[str, ...], inside: tuple[str, ...]
) -> None:
    """The reference has no wrapper. What DDP does not hold has the gradients of its own rank."""
    parallelize = functools.partial(wrapped, how=how, inside=inside)
    options = {"mesh": "dp=2", "batch": IDS, "optimizer": adamw, "raises": False}
    report = isoshard_check(build, parallelize, **options)
    assert "by no rank" not in report.text
    assert report.conforms == bool(how), report.text


def test_a_missing_all_reduce_below_a_compiled_wrapper_is_found(isoshard_check: Check) -> None:
    how = ("ddp", "checkpoint", "compile")
    with pytest.raises(Divergence, match="rank-local over dp"):
        isoshard_check(
            build,
            functools.partial(wrapped, how=how, fault="not reduced"),
            mesh="dp=2",
            batch=IDS,
            optimizer=adamw,
            parallel_reference=True,
        )


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
