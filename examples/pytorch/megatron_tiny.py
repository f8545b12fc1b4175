# SPDX-License-Identifier: Apache-2.0
"""What megatron_gpt.py trains: sizes, switches, batches, and the loss of a micro-batch."""

import torch
from megatron.core import distributed
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

LENGTH, VOCABULARY = 32, 256
SIZES = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4}
SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
ON_CPU = {"use_cpu_initialization": True, "gradient_accumulation_fusion": False}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "masked_softmax_fusion": False}


def settings_of(flags, tp):
    """Of the model, its data parallelism and its optimizer; flags are zero, sp and bf16."""
    is_bf16, is_zero = "bf16" in flags, "zero" in flags
    kind = {"params_dtype": torch.bfloat16 if is_bf16 else torch.float32, "bf16": is_bf16}
    cut = {"tensor_model_parallel_size": tp, "sequence_parallel": "sp" in flags and tp > 1}
    rest = {"num_query_groups": 2, **cut, **NO_DROPOUT, **ON_CPU}
    config = TransformerConfig(**SIZES, **SWIGLU, **kind, **rest)
    config.finalize_model_grads_func = distributed.finalize_model_grads
    buckets = distributed.DistributedDataParallelConfig(True, use_distributed_optimizer=is_zero)
    adam = OptimizerConfig(lr=1e-3, clip_grad=1.0, use_distributed_optimizer=is_zero, **kind)
    return config, buckets, adam


def batches_of(steps):
    """The ids of each step's whole batch of 8 samples, with one position more for the labels."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, VOCABULARY, (steps, 8, LENGTH + 1), generator=generator)


def forward_step(batches, model):
    """What Megatron-Core's schedule calls for each micro-batch."""
    ids, mask = next(batches), torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    positions = torch.arange(LENGTH).expand(len(ids), LENGTH)
    losses = model(ids[:, :-1], positions, mask, labels=ids[:, 1:])
    return losses, lambda losses: (losses.mean(), {})
