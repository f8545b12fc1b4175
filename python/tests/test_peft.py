# SPDX-License-Identifier: Apache-2.0
"""PEFT: LoRA adapters over frozen weights, with DDP and FSDP2; planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_runs import Runs, before, fault, needs

pytestmark = needs("peft", "transformers")

_STEP = "    optimizer.step()"
_TRAINED = "trained ="
DDP = {
    "adapters not reduced": fault("model = DistributedDataParallel(model)", "pass", "X"),
    "gradients summed for averaged": before(
        _STEP, "    [p.grad.mul_(dist.get_world_size()) for p in trained]", "X"
    ),
    "same data on all ranks": fault("[dist.get_rank()]", "[0]", "X"),
    "adapters scaled twice": fault("lora_alpha=8", "lora_alpha=16", "X"),
    "a frozen weight trained": before(
        _TRAINED,
        "model.module.base_model.model.lm_head.weight.requires_grad_()",
        "X",
    ),
    "adapters of one rank drawn anew": before(
        _TRAINED,
        "for name, parameter in model.named_parameters():\n"
        "    if 'lora_A' in name and dist.get_rank() == 1:\n"
        "        torch.nn.init.normal_(parameter, std=0.02)",
        "X",
    ),
    "a frozen weight of one rank is another one": before(
        _TRAINED,
        "if dist.get_rank() == 1:\n"
        "    model.module.base_model.model.lm_head.weight.data.mul_(1.001)",
        "X",
    ),
}
FSDP2 = {
    "sum for average": before(
        "dist.init_process_group",
        "from torch.distributed.fsdp._fully_shard import _fsdp_collectives as c\n"
        "SUM = dist.ReduceOp.SUM\n"
        "c._get_gradient_divide_factors = lambda *a, **k: (None, None, SUM, SUM)",
        "X",
    ),
    "one micro-batch for two": fault(
        "model(input_ids=ids, labels=ids).loss.backward()",
        "model(input_ids=ids, labels=ids).loss.backward()\n    trained[0].grad.zero_()",
        "X",
    ),
}
FAULTS = [
    ("ddp", ("dp=2", 2, "peft_lora.py", "--wrap ddp"), DDP),
    ("fsdp2", ("dp=2", 2, "peft_lora.py", "--wrap fsdp2"), FSDP2),
]
