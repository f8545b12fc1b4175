# SPDX-License-Identifier: Apache-2.0
"""FSDP2 with its options, HSDP, tensor parallelism below it, and DDP with no_sync."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_models import LIVE, Blocks, Check, adamw, conforms, ids_of, sgd
from torch import nn

from isoshard import Divergence

pytestmark = LIVE
IDS = ids_of(16, 6)
HYBRID = {"dp_replicate": 2, "dp_shard": 2}
TENSOR = {"dp": 2, "tp": 2}


def build() -> nn.Module:
    return Blocks(16, 32)


def _local(layouts: Any, use_local: bool, module: Any, outputs: Any, mesh: Any) -> torch.Tensor:
    return outputs.to_local()


def fsdp2(
    model: nn.Module, mesh: Any, fault: str = "", policy: tuple[Any, Any] | None = None, **kw: Any
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import parallel as tp

    names = mesh.mesh_dim_names
    if "tp" in names:
        plan: dict[str, Any] = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
        if fault == "no all-reduce in a row":
            plan["down"] = tp.RowwiseParallel()
            plan["down"]._prepare_output_fn = _local
        for layer in model.layers:
            tp.parallelize_module(layer, mesh["tp"], plan)
    data = mesh["dp"] if "dp" in names else mesh["dp_replicate", "dp_shard"]
    if fault == "replicas apart":
        data = mesh["dp_shard"]
    if policy is not None:
        kw["mp_policy"] = MixedPrecisionPolicy(param_dtype=policy[0], reduce_dtype=policy[1])
    for part in (*model.layers, model):
        fully_shard(part, mesh=data, **kw)
    if fault == "no division":
        for part in (*model.layers, model):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            part.set_gradient_divide_factor(1.0)
    if fault == "sync switched off" and mesh.size() > 1:
        model.layers[1].set_requires_gradient_sync(False)
    if fault == "stale shard" and dist.get_rank() == 1:
        with torch.no_grad():
            model.layers[0].up.weight.to_local().mul_(1.01)
    if fault == "scaled twice" and mesh.size() > 1:
        model.layers[1].register_full_backward_hook(lambda m, i, o: tuple(g * 2 for g in i))


def no_sync(model: nn.Module, mesh: Any, fault: str = "") -> nn.Module:
    """DDP that reduces with the last of four micro-batches, as under `with ddp.no_sync()`."""
    ddp: Any = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    forward, calls = ddp.forward, [0]
    reduced_with = {"": 0, "never": -1, "first": 1}[fault]

    def call(ids: torch.Tensor) -> Any:
        calls[0] += 1
        ddp.require_backward_grad_sync = calls[0] % 4 == reduced_with
        return forward(ids)

    ddp.forward = call
    return ddp


@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("mesh", [{"dp": 4}, HYBRID, TENSOR])
def test_fsdp2_conforms(isoshard_check: Check, mesh: dict[str, int], reshard: Any) -> None:
    if reshard == 2 and mesh != {"dp": 4}:
        reshard = True
    parallelize = functools.partial(fsdp2, reshard_after_forward=reshard)
    conforms(
        isoshard_check,
        build,
        parallelize,
        mesh=mesh,
        batch=IDS,
        optimizer=adamw,
        micro_batches=2,
        steps=2,
        max_grad_norm=None if "tp" in mesh else 0.5,  # torch adds no norms over two meshes
    )


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mesh", [{"dp": 2}, HYBRID, TENSOR])
def test_mixed_precision_conforms(
    isoshard_check: Check, mesh: dict[str, int], reduce: torch.dtype, optimizer: Any
) -> None:
    conforms(
        isoshard_check,
        build,
        functools.partial(fsdp2, policy=(torch.bfloat16, reduce)),
        mesh=mesh,
        batch=IDS,
        optimizer=optimizer,
        parallel_reference=True,
    )


@pytest.mark.parametrize(
    ("mesh", "fault", "words"),
    [
        (HYBRID, "replicas apart", "rank-local over dp_replicate"),
        (HYBRID, "no division", r"first gradient of embed.weight.*scale (4|3\.99\d*)"),
        ({"dp": 2}, "no division", r"(embed.weight|all parameters): scale (2|1\.99\d*) = dp"),
        ({"dp": 2}, "stale shard", r"first weight as read layers.0.up.weight.*on rank 1"),
        ({"dp": 2}, "scaled twice", "scale 2"),
        ({"dp": 2}, "sync switched off", "first gradient of layers.1.norm.weight"),
        (TENSOR, "no all-reduce in a row", "first forward at layers.0.down"),
    ],
)
@pytest.mark.parametrize("policy", [None, (torch.bfloat16, torch.float32)])
def test_what_is_wrong_is_found(
    isoshard_check: Check, mesh: dict[str, int], fault: str, words: str, policy: Any
) -> None:
    with pytest.raises(Divergence, match=words):
        isoshard_check(
            build,
            functools.partial(fsdp2, fault=fault, policy=policy),
            mesh=mesh,
            batch=IDS,
            optimizer=adamw,
            parallel_reference=policy is not None,
        )


def evaluated(
    model: nn.Module, mesh: Any, roots: str = "one", **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2's modules after a forward pass without gradients, which leaves parameters gathered."""
    from torch.distributed.fsdp import fully_shard

    if roots == "one":
        fsdp2(model, mesh, **options)
    else:
        for part in (model.embed, *model.layers, model.head):
            fully_shard(part, mesh=mesh["dp"], **options)
    optimizer = adamw(model.parameters())
    with torch.no_grad():
        model(IDS[:4])
    return model, optimizer


@pytest.mark.parametrize(
    ("roots", "mesh", "reshard"),
    [
        ("one", {"dp": 2}, True),
        ("one", {"dp": 2}, False),
        ("one", {"dp": 4}, 2),
        ("one", HYBRID, True),
        ("each part", {"dp": 2}, True),
    ],
)
def test_a_model_that_was_evaluated_first_conforms(
    isoshard_check: Check, roots: str, mesh: dict[str, int], reshard: Any
) -> None:
    parallelize = functools.partial(evaluated, roots=roots, reshard_after_forward=reshard)
    conforms(isoshard_check, build, parallelize, mesh=mesh, batch=IDS, optimizer=adamw, steps=2)


@pytest.mark.parametrize("policy", [None, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no division", r"scale (2|1\.99\d*) = dp"),
        ("stale shard", r"first weight as read layers.0.up.weight.*on rank 1"),
        ("sync switched off", "first gradient of layers.1.norm.weight"),
    ],
)
def test_what_is_wrong_after_an_evaluation_is_found(
    isoshard_check: Check, fault: str, words: str, policy: Any
) -> None:
    with pytest.raises(Divergence, match=words):
        isoshard_check(
            build,
            functools.partial(evaluated, fault=fault, policy=policy),
            mesh={"dp": 2},
            batch=IDS,
            optimizer=adamw,
            parallel_reference=policy is not None,
        )


def from_meta(model: nn.Module, mesh: Any, way: str, fault: str = "") -> nn.Module:
    """The model made without memory, then sharded, then filled: its shards are new parameters.

    `set` puts them in place as transformers' from_pretrained does, which FSDP2 does not notice
    before the next forward pass.
    """
    from torch.distributed.tensor import distribute_tensor

    whole = model.state_dict()
    with torch.device("meta"):
        shell = build()
    fsdp2(shell, mesh)
    if way == "to_empty":
        shell.to_empty(device="cpu")
    parts = {
        name: distribute_tensor(whole[name], p.device_mesh, p.placements)
        for name, p in shell.named_parameters()
    }
    if way == "set":
        for name, part in parts.items():
            place, _, last = name.rpartition(".")
            setattr(shell.get_submodule(place), last, nn.Parameter(part))
    else:
        shell.load_state_dict(parts, assign=way == "assign")
    if fault and dist.get_rank() == 1:
        with torch.no_grad():
            shell.layers[0].up.weight.to_local().mul_(1.01)
    return shell


@pytest.mark.parametrize("way", ["to_empty", "assign", "set"])
def test_a_model_from_the_meta_device_is_judged(isoshard_check: Check, way: str) -> None:
    words: dict[str, Any] = {"mesh": {"dp": 2}, "batch": IDS, "optimizer": adamw, "steps": 2}
    conforms(isoshard_check, build, functools.partial(from_meta, way=way), **words)
    wrong = functools.partial(from_meta, way=way, fault="stale shard")
    with pytest.raises(Divergence, match=r"first weight as read layers.0.up.weight.*on rank 1"):
        isoshard_check(build, wrong, **words)


@pytest.mark.parametrize("steps", [1, 2])
def test_no_sync_conforms(isoshard_check: Check, steps: int) -> None:
    options = {"mesh": "dp=2", "batch": IDS, "optimizer": adamw, "micro_batches": 4}
    conforms(isoshard_check, build, no_sync, steps=steps, **options)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("never", "rank-local over dp"), ("first", r"first gradient of embed.weight")],
)
def test_gradients_that_are_never_reduced_are_found(
    isoshard_check: Check, fault: str, words: str
) -> None:
    parallelize = functools.partial(no_sync, fault=fault)
    with pytest.raises(Divergence, match=words):
        isoshard_check(build, parallelize, mesh="dp=2", batch=IDS, optimizer=adamw, micro_batches=4)
