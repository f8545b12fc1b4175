# SPDX-License-Identifier: Apache-2.0
# cd ../pytorch && torchrun --standalone --nproc-per-node 1 ../found/megatron_mixed_dtypes.py
"""Megatron-Core 0.16.1: the distributed optimizer returns the state of another parameter."""

import os
import sys

sys.path.append(os.getcwd())
import megatron_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from megatron.core import distributed, parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel()
model = torch.nn.Sequential(
    torch.nn.Linear(4, 3, bias=False).bfloat16(),
    torch.nn.Linear(3, 3, bias=False),  # in fp32, as routers of experts are
    torch.nn.Linear(3, 5, bias=False).bfloat16(),
)
config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True,
                           params_dtype=torch.bfloat16, use_cpu_initialization=True)  # fmt: skip
buckets = distributed.DistributedDataParallelConfig(True, use_distributed_optimizer=True)
ddp = distributed.DistributedDataParallel(config, buckets, model)
options = {"bf16": True, "params_dtype": torch.bfloat16, "use_distributed_optimizer": True}
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, **options), [ddp])
for part in getattr(optimizer, "chained_optimizers", [optimizer]):
    for name, parameter in model.named_parameters():
        if parameter in part.model_param_group_index_map:
            state = part._get_main_param_and_optimizer_states(parameter)["param"]
            size = parameter.numel()
            print(f"{name}: {size} elements, its main parameter has {state.numel()}: "
                  f"{'right' if state.numel() == size else 'another parameter'}")  # fmt: skip
