# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own: DDP, FSDP2, HSDP, tensor, sequence and loss parallelism, pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .. import models
from ..spec import Spec, mesh

PRELOAD = (
    *("transformers", "transformers.models.auto.modeling_auto", "matrix.models"),
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
)
#: Process groups of cases stay open in the ranks: after so many these are started anew.
CASES = 100
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

#: Architectures for data parallelism: of each kind of block one.
MODELS = (
    *("qwen2", "qwen3", "llama", "gpt2", "mistral", "gemma", "gemma2", "falcon", "phi", "gpt_neox"),
    *("opt", "bloom", "mixtral", "qwen2_moe", "starcoder2", "olmo2", "cohere", "stablelm"),
    *("granite", "glm", "gptj", "codegen", "gpt_bigcode", "biogpt", "xglm", "mpt", "persimmon"),
    *("roformer", "electra", "mamba", "jetmoe", "lfm2", "bitnet", "moshi"),
)
DDP_VARIANTS = ("plain", "no_sync", "bucket_view", "unused", "static", "buckets", "bf16_hook")
FSDP_VARIANTS = ("plain", "keep", "some", "whole", "no_sync", "mixed", "mixed32", "offload")


def specs() -> Iterator[Spec]:
    """DDP and FSDP2 over architectures and over their options; DTensor plans over sizes."""
    yield from _ddp()
    yield from _fsdp2()
    for variant in ("plain", "sequence", "loss", "sequence_loss", "uneven"):
        for optimizer, sizes in (("adamw", "even"), ("sgd", "odd")):
            new = partial(Spec, "tp", "mlp", variant=variant, sizes=sizes, optimizer=optimizer)
            yield new(mesh=mesh(tp=2), steps=2)
            yield new(mesh=mesh(tp=4), micro_batches=2, seed=1)
            yield new(mesh=mesh(dp=2, tp=2), seed=2)
        yield Spec("tp", "mlp", mesh(dp=2, tp=2), variant=variant, clip=0.2, seed=3)
    for variant in ("uneven_local", "sequence_uneven"):
        yield Spec("tp", "mlp", mesh(tp=2), variant=variant)
    for variant in ("loss_ignore", "loss_smooth", "loss_sum", "loss_none"):
        yield Spec("tp", "mlp", mesh(tp=2), variant=variant)
        yield Spec("tp", "mlp", mesh(tp=4), variant=variant, sizes="odd")
    for tied in (False, True):
        yield Spec("tp", "mlp", mesh(tp=2), variant="embedding", tied=tied, steps=2)
        yield Spec("tp", "mlp", mesh(tp=2), variant="embedding", tied=tied, sizes="odd")
        yield Spec("tp", "mlp", mesh(tp=2), variant="embedding_columns", tied=False, sizes="odd")


def _ddp() -> Iterator[Spec]:
    for i, name in enumerate(MODELS):
        new = partial(Spec, "ddp", name, optimizer=("adamw", "momentum")[i % 2])
        yield new(mesh=mesh(dp=2 + i % 2), tied=i % 3 == 0, micro_batches=1 + i % 2)
    for i, variant in enumerate(DDP_VARIANTS):
        for name in ("mlp", "qwen2", "gpt2"):
            new = partial(Spec, "ddp", name, variant=variant)
            yield new(mesh=mesh(dp=2), micro_batches=3, steps=2)
            yield new(mesh=mesh(dp=3), micro_batches=2, tied=True, clip=0.1, seed=i)
    for dtype, name in (("bf16", "mlp"), ("bf16", "llama"), ("fp64", "mlp"), ("fp64", "llama")):
        yield Spec("ddp", name, mesh(dp=2), dtype=dtype, optimizer="sgd", micro_batches=2)
    yield Spec("ddp", "mlp", mesh(dp=4), sizes="odd", steps=3)
    for data in (2, 3):
        yield Spec("ddp", "mlp", mesh(dp=data), variant="frozen", micro_batches=2, steps=2)
        yield Spec("ddp", "mlp", mesh(dp=data), variant="tokens", micro_batches=2, steps=2)


def _fsdp2() -> Iterator[Spec]:
    for i, name in enumerate(MODELS):
        new = partial(Spec, "fsdp2", name, optimizer=("adamw", "momentum")[i % 2], steps=2)
        yield new(mesh=mesh(dp=2 + (i + 1) % 2), tied=i % 2 == 0, sizes=("even", "odd")[i % 2])
    for i, variant in enumerate(FSDP_VARIANTS):
        for j, name in enumerate(("mlp", "qwen2", "gpt2")):
            new = partial(Spec, "fsdp2", name, variant=variant)
            yield new(mesh=mesh(dp=2), micro_batches=3, clip=0.1, tied=j == 1)
            yield new(mesh=mesh(dp=3), sizes="odd", steps=2, tied=True, seed=i)
            yield new(mesh=mesh(dp_replicate=2, dp_shard=2), micro_batches=2, clip=0.1, seed=i)
    for data in (2, 3):
        yield Spec("fsdp2", "mlp", mesh(dp=data), variant="frozen", micro_batches=2, steps=2)
        yield Spec("fsdp2", "mlp", mesh(dp=data), variant="tokens", micro_batches=2, steps=2)
        yield Spec("fsdp2", "mlp", mesh(dp=data), dtype="fp64", clip=0.1, sizes="odd")
        yield Spec("fsdp2", "mlp", mesh(dp=data), variant="columns", steps=2)
        yield Spec("fsdp2", "mlp", mesh(dp=data), variant="factor", micro_batches=2)


def build(spec: Spec) -> torch.nn.Module:
    """The tiny model of a case."""
    uneven = {"inner": 27} if spec.variant.startswith("uneven") else {}
    model = models.build_mlp(spec, **uneven) if spec.architecture == "mlp" else models.build(spec)
    if spec.variant == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name or "up" in name)
    return model


def _ddp_model(spec: Spec, model: Any, device_mesh: Any) -> Any:
    options: dict[str, Any] = {
        "bucket_view": {"gradient_as_bucket_view": True},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True},
        "buckets": {"bucket_cap_mb": 0.001},
    }.get(spec.variant, {})
    return DistributedDataParallel(model, process_group=device_mesh.get_group("dp"), **options)


def shard(spec: Spec, model: Any, device_mesh: Any) -> Any:
    """fully_shard on each block and on the model, with the options of the case."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    options: dict[str, Any] = {"mesh": device_mesh}
    if spec.variant == "keep":
        options["reshard_after_forward"] = False
    if spec.variant.startswith("mixed"):
        reduce = torch.float32 if spec.variant == "mixed32" else torch.bfloat16
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce)
    if spec.variant == "columns":
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1)
    if spec.variant != "whole":
        for i, block in enumerate(blocks_of(model)):
            if spec.variant != "some" or i == 0:
                fully_shard(block, **options)
    fully_shard(model, **options)
    if spec.variant == "factor":
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(float(spec.data_degree))
    return model


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers: the elements of the first list of modules."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return list(lists[0]) if lists else []


def _tp_model(spec: Spec, model: Any, device_mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    is_cut, is_loss = "sequence" in spec.variant, "loss" in spec.variant
    plan: dict[str, Any] = {}
    for i in range(len(model.layers)):
        at = f"layers.{i}."
        into = {"input_layouts": Shard(1)} if is_cut else {}
        out = {"output_layouts": Shard(1)} if is_cut else {}
        plan |= {at + n: ColwiseParallel(**into) for n in ("q", "k", "v")}
        plan |= {at + "o": RowwiseParallel(**out)}
        is_local = spec.variant != "uneven"
        plan |= {at + "up": ColwiseParallel(**into, use_local_output=is_local)}
        plan |= {at + "down": RowwiseParallel(**out)}
        if is_cut:
            plan |= {at + "norm1": SequenceParallel(), at + "norm2": SequenceParallel()}
    if is_cut:
        plan |= {"norm": SequenceParallel()}
    if is_cut:
        plan |= {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    elif spec.variant == "embedding":
        plan |= {"embed": RowwiseParallel(input_layouts=Replicate())}
    elif spec.variant == "embedding_columns":
        plan |= {"embed": ColwiseParallel(output_layouts=Replicate())}
    head: dict[str, Any] = {"input_layouts": Shard(1)} if is_cut else {}
    head |= {"output_layouts": Shard(-1) if is_loss else Replicate()}
    plan |= {"head": ColwiseParallel(**head, use_local_output=not is_loss)}
    parallelize_module(model, device_mesh["tp"], plan)
    if spec.tied:
        model.head.weight = model.embed.weight
    if "dp" in spec.degrees:
        for block in model.layers:
            fully_shard(block, mesh=device_mesh["dp"])
        fully_shard(model, mesh=device_mesh["dp"])
    return model


def parallelize(spec: Spec, model: Any, device_mesh: Any) -> Any:
    """The wrapped model."""
    wrap = {"ddp": _ddp_model, "fsdp2": shard, "tp": _tp_model}[spec.framework]
    wrapped = wrap(spec, model, device_mesh)
    if spec.variant == "bf16_hook":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def _step(spec: Spec, model: Any, optimizer: Any, parts: list[Any]) -> None:
    """No synchronization of gradients but in the last micro-batch; loss parallelism around all."""
    from torch.distributed.tensor.parallel import loss_parallel

    if "loss" in spec.variant:
        with loss_parallel():
            for part in parts:
                torch.autograd.backward(_loss(spec, _call(model, part), part) / len(parts))
        _update(spec, model, optimizer)
        return
    for i, part in enumerate(parts):
        is_last = i == len(parts) - 1
        is_ddp = isinstance(model, DistributedDataParallel)
        if not is_ddp:
            model.set_requires_gradient_sync(is_last)
        with nullcontext() if is_last or not is_ddp else model.no_sync():
            torch.autograd.backward(_loss(spec, _call(model, part), part) / len(parts))
    _update(spec, model, optimizer)


def _update(spec: Spec, model: Any, optimizer: Any) -> None:
    if spec.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.clip)
    optimizer.step()
    optimizer.zero_grad()


def _call(model: Any, part: Any) -> Any:
    return model(**part) if isinstance(part, dict) else model(part)


#: Labels of these positions count as no token.
_IGNORED = -100


def _loss(spec: Spec, output: Any, part: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(part, dict):
        return torch.as_tensor(output.loss)
    targets, kind = part[:, 1:].clone(), spec.variant
    if kind in ("loss_ignore", "tokens"):
        targets[targets % 5 == 0] = _IGNORED
    options: dict[str, Any] = {"loss_smooth": {"label_smoothing": 0.1}}.get(kind, {})
    if kind == "loss_sum":
        options["reduction"] = "sum"
    elif kind in ("loss_none", "tokens"):
        options["reduction"] = "none"
    logits = output[:, :-1].flatten(0, 1)
    flat = targets.flatten()
    if isinstance(logits, DTensor):
        loss = torch.nn.functional.cross_entropy(logits, flat, **options)
        return loss.mean() if kind == "loss_none" else loss
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = torch.nn.functional.cross_entropy(logits, flat, **options)
    if kind == "tokens":  # a summand of the mean over the tokens of all ranks and micro-batches
        return losses.sum() / 100.0 * (spec.data_degree * spec.micro_batches * 2 / len(part))
    return losses.mean() if kind == "loss_none" else losses


def arguments(spec: Spec) -> dict[str, Any]:
    """What isoshard.check gets."""
    is_mlp = spec.architecture == "mlp"
    length = 7 if spec.variant == "sequence_uneven" else 8
    batch: Any = models.ids_of(spec, length=length, vocabulary=48) if is_mlp else None
    found = {
        "build": partial(build, spec),
        "parallelize": partial(parallelize, spec),
        "batch": models.batch_of(spec, length=length) if batch is None else batch,
        "optimizer": partial(models.make_optimizer, spec),
        "loss": partial(_loss, spec),
        "parallel_reference": spec.variant.startswith("mixed"),
    }
    if spec.architecture == "jetmoe":
        why = "rows are sorted by expert, on each rank its own"
        kinds = ("activation", "activation_grad")
        names = ("*.experts.*", "*.mlp.*")
        found["not_recorded"] = {f"{kind}/{name}": why for kind in kinds for name in names}
    if spec.variant == "no_sync" or (spec.framework == "tp" and "loss" in spec.variant):
        found["step"] = partial(_step, spec)
    return found
