# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ZeRO stages and AutoTP with accumulated gradients; planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_runs import Runs, before, fault, needs

pytestmark = needs("deepspeed", "transformers")

_TRAINING = "for batch in"
_STEP = "    engine.step()"
ZERO3 = {
    "gradients summed for averaged": before(
        _TRAINING, "engine.optimizer._gradient_averaging_world_size = lambda *_: 1", "X"
    ),
    "same data on all ranks": fault("[rank]", "[0]", "X"),
    "first micro-batch lost": before(
        "    engine.backward", "    engine.optimizer.grad_partitions_flat_buffer.zero_()", "X"
    ),
    "one rank's partitions not stepped": before(
        _STEP,
        "    if rank == 1 and engine.is_gradient_accumulation_boundary():\n"
        "        engine.basic_optimizer.step = lambda *_, **__: None",
        "X",
    ),
    "norm of one rank's partitions": before(
        _TRAINING,
        "torch.distributed.barrier()\n"
        "engine.optimizer.clip_grad = 0.5 / 2",
        "X",
    ),
    "a partition of one rank moved": before(
        _TRAINING,
        "if rank == 1:\n"
        "    part = model.model.embed_tokens.weight.ds_tensor\n"
        "    part.copy_(part.roll(64))",
        "X",
    ),
}
AUTOTP = {
    "no all-reduce behind row-parallel layers": before(
        _TRAINING,
        "from deepspeed.module_inject import layers\n"
        "layers.RowParallel.forward = staticmethod(lambda ctx, group, x, is_inference: x.clone())",
        "X",
    ),
    "input gradients of column-parallel layers not summed": before(
        _TRAINING,
        "from deepspeed.module_inject import layers\n"
        "layers.ColumnParallel.backward = staticmethod(lambda ctx, grad: (None, grad))",
        "X",
    ),
    "norms counted tp times": before(
        _STEP,
        "    for name, parameter in model.named_parameters():\n"
        "        if 'norm' in name and engine.is_gradient_accumulation_boundary():\n"
        "            parameter.grad.mul_(tp)",
        "X",
    ),
    "heads of key and value swapped": before(
        _TRAINING,
        "for layer in model.model.layers:\n"
        "    weight = layer.self_attn.q_proj.weight\n"
        "    weight.data = weight.data.roll(16, 0)",
        "X",
    ),
    "other data on one rank of a group": before(
        "    engine.backward", "    ids = ids.roll(rank % tp, 1)", "X"
    ),
    "gradients summed for averaged": before(
        _STEP,
        "    if engine.is_gradient_accumulation_boundary():\n"
        "        [p.grad.mul_(dp) for p in model.parameters()]",
        "X",
    ),
}
FAULTS = [
    ("zero3", ("dp=2", 2, "deepspeed_zero.py", "--zero 3"), ZERO3),
    ("autotp", ("dp=2,tp=2", 4, "deepspeed_autotp.py", "--tp 2"), AUTOTP),
]
