# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core: whole GPT models with its DistributedDataParallel and its optimizers."""

from __future__ import annotations

import contextlib
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import models
from ..spec import Spec, mesh

PRELOAD = ("megatron.core", "megatron.core.optimizer", "matrix.models")
#: Process groups of cases stay open in the ranks: after so many these are started anew.
CASES = 10
ENVIRONMENT = {"PYTHONWARNINGS": "ignore"}
_EXAMPLES = Path(__file__).parents[3] / "examples" / "pytorch"
LENGTH, VOCABULARY, INNER = 8, 64, 48

_RECOMPUTED = (
    *(("recompute_granularity", "full"), ("recompute_method", "uniform")),
    ("recompute_num_layers", 1),
)
#: Settings of TransformerConfig that change what is computed, or how.
SWITCHES: tuple[tuple[tuple[str, Any], ...], ...] = (
    (("add_bias_linear", False),),
    (("add_qkv_bias", True), ("add_bias_linear", False)),
    (("qk_layernorm", True),),
    (("num_query_groups", 2),),
    (("num_query_groups", 1),),
    (("num_query_groups", 1), ("qk_layernorm", True)),
    (("gated_linear_unit", False),),
    (("_tied", True),),
    (("_positions", "learned_absolute"),),
    _RECOMPUTED,
    (("num_moe_experts", 4), ("moe_router_topk", 2), ("add_bias_linear", False)),
    (
        ("num_moe_experts", 4),
        ("moe_router_load_balancing_type", "aux_loss"),
        ("moe_aux_loss_coeff", 0.01),
        ("add_bias_linear", False),
    ),
    (
        ("num_moe_experts", 4),
        ("moe_shared_expert_intermediate_size", 32),
        ("add_bias_linear", False),
    ),
    (("apply_residual_connection_post_layernorm", True),),
    (("attention_softmax_in_fp32", True), ("apply_query_key_layer_scaling", True)),
)
#: Options of DistributedDataParallelConfig.
BUCKETS = (
    (("_overlap_grad_reduce", True),),
    (("_average_in_collective", True),),
    (("_bucket_size", 500),),
    (("_overlap_grad_reduce", True), ("_bucket_size", 500)),
)


def specs() -> Iterator[Spec]:
    """Switches of the model on tp 2, with and without sequence parallelism; buckets over dp."""
    for i, switches in enumerate(SWITCHES):
        new = partial(Spec, "megatron", "gpt", config=switches, clip=0.2)
        yield new(mesh(tp=2), "plain", micro_batches=1 + i % 2)
        yield new(mesh(tp=2), "sp", micro_batches=1 + i % 2, optimizer="sgd")
    for i, variant in enumerate(("plain", "sp", "zero", "zero_sp")):
        new = partial(Spec, "megatron", "gpt", variant=variant, clip=0.2, seed=i)
        yield new(mesh=mesh(dp=2), micro_batches=2, steps=2)
        yield new(mesh=mesh(dp=2, tp=2), micro_batches=2)
        yield new(mesh=mesh(dp=2, tp=2), dtype="bf16", steps=2)
        yield new(mesh=mesh(dp=3), dtype="bf16", micro_batches=2)
        yield new(mesh=mesh(tp=4), config=(("_tied", True),))
        yield new(mesh=mesh(dp=2), config=(("_tied", True),), steps=2)
        yield new(mesh=mesh(dp=2, tp=2), config=(("_tied", True), ("qk_layernorm", True)))
    for variant in ("plain", "zero"):
        for options in BUCKETS:
            yield Spec("megatron", "gpt", mesh(dp=2), variant, micro_batches=2, config=options)
            yield Spec("megatron", "gpt", mesh(dp=2, tp=2), variant, config=options, clip=0.2)
    yield Spec("megatron", "gpt", mesh(dp=2), "zero", dtype="bf16", config=(("_fp32_norms", True),))
    yield Spec("megatron", "gpt", mesh(tp=4), "plain", config=(("num_query_groups", 2),))


def _private(spec: Spec, key: str, default: Any = None) -> Any:
    return dict(spec.config).get(key, default)


def placeholder() -> torch.nn.Module:
    """Megatron's layers are built on a mesh, so parallelize builds the model."""
    return torch.nn.Linear(1, 1)


def parallelize(spec: Spec, model: Any, device_mesh: Any) -> Any:
    """(GPTModel in Megatron's DistributedDataParallel, Megatron's optimizer)"""
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))
    with contextlib.suppress(ImportError):
        import megatron_on_cpu  # noqa: F401
    from megatron.core import distributed, parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    is_one = device_mesh.size() == 1
    tp = 1 if is_one else spec.degrees.get("tp", 1)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(spec.seed)
    is_zero = "zero" in spec.variant
    kind = {"params_dtype": spec.torch_dtype, "bf16": spec.dtype == "bf16"}
    settings: dict[str, Any] = {
        **{"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": INNER, "num_attention_heads": 4},
        **{"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
        **{"tensor_model_parallel_size": tp, "sequence_parallel": "sp" in spec.variant and tp > 1},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "masked_softmax_fusion": False},
        **{"use_cpu_initialization": True, "gradient_accumulation_fusion": False},
        **kind,
        **{key: value for key, value in spec.config if not key.startswith("_")},
    }
    config = TransformerConfig(**settings)
    config.finalize_model_grads_func = distributed.finalize_model_grads
    layers = gpt_layer_specs.get_gpt_layer_local_spec(
        num_experts=settings.get("num_moe_experts"),
        moe_grouped_gemm=False,
        qk_layernorm=bool(settings.get("qk_layernorm")),
    )
    positions = _private(spec, "_positions", "rope")
    gpt = GPTModel(
        config,
        layers,
        VOCABULARY,
        LENGTH,
        position_embedding_type=positions,
        share_embeddings_and_output_weights=bool(_private(spec, "_tied")),
    )
    _stir(spec, gpt, parallel_state.get_tensor_model_parallel_rank(), tp)
    if _private(spec, "_fp32_norms"):
        for name, parameter in gpt.named_parameters():
            if "norm" in name:
                parameter.data = parameter.data.float()
    names = ("overlap_grad_reduce", "average_in_collective", "bucket_size")
    given = {n: _private(spec, f"_{n}") for n in names if _private(spec, f"_{n}") is not None}
    buckets = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=is_zero, **given
    )
    wrapped = distributed.DistributedDataParallel(config, buckets, gpt)
    options: dict[str, Any] = {"lr": 1e-3, "clip_grad": spec.clip or 1e6, **kind}
    if spec.optimizer == "sgd":
        options |= {"optimizer": "sgd", "lr": 0.05, "sgd_momentum": 0.9}
    adam = OptimizerConfig(**options, use_distributed_optimizer=is_zero)
    return wrapped, get_megatron_optimizer(adam, [wrapped])


def _stir(spec: Spec, model: torch.nn.Module, rank: int, tp: int) -> None:
    """Moves weights as models.stir does, each rank its part of the same numbers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + spec.seed)
            shape = list(parameter.shape)
            is_cut = bool(getattr(parameter, "tensor_model_parallel", False)) and tp > 1
            dim = int(getattr(parameter, "partition_dim", 0)) if is_cut else 0
            if is_cut:
                shape[dim] *= tp
            noise = torch.randn(shape, generator=generator) * 0.05
            if is_cut and "linear_fc1" in name and _private(spec, "gated_linear_unit", True):
                halves = noise.chunk(2, dim)
                noise = torch.cat([half.chunk(tp, dim)[rank] for half in halves], dim)
            elif is_cut:
                noise = noise.chunk(tp, dim)[rank]
            parameter.add_(noise.to(parameter.dtype))


def _forward(batches: Iterator[torch.Tensor], model: Any) -> Any:
    ids = next(batches)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    positions = torch.arange(LENGTH).expand(len(ids), LENGTH)
    losses = model(ids[:, :-1], positions, mask, labels=ids[:, 1:])
    return losses, lambda losses: (losses.mean(), {})


def step(spec: Spec, model: Any, optimizer: Any, parts: list[Any]) -> None:
    """As Megatron's trainer: buffers to zero, the schedule, a step."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=iter(parts),
        model=model,
        num_microbatches=len(parts),
        seq_length=LENGTH,
        micro_batch_size=len(parts[0]),
    )
    optimizer.step()
    dist.barrier()


def arguments(spec: Spec) -> dict[str, Any]:
    """What isoshard.check gets."""
    return {
        "build": placeholder,
        "parallelize": partial(parallelize, spec),
        "batch": models.ids_of(spec, length=LENGTH + 1, vocabulary=VOCABULARY),
        "optimizer": partial(models.make_optimizer, spec),
        "step": partial(step, spec),
        "parallel_reference": True,
        "max_grad_norm": None,
    }
