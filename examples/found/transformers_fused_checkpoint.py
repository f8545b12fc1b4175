# SPDX-License-Identifier: Apache-2.0
# torchrun --standalone --nproc-per-node 2 transformers_fused_checkpoint.py
"""transformers 5.23.0: a fused checkpoint tensor is cut over ranks before it is split in parts."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}
for name, kind in (("llama", "tp_size"), ("hrm_text", "tp_size"), ("olmo_hybrid", "fsdp_size")):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **sizes, **heads)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder[0])
    dist.barrier()
    cut = AutoModelForCausalLM.from_pretrained(
        folder[0], dtype=torch.float32, distributed_config=DistributedConfig(**{kind: 2})
    )
    wrong = []
    for key, parameter in cut.named_parameters():
        mine, right = parameter.detach(), whole.get_parameter(key).detach()
        if hasattr(mine, "to_local"):
            right = distribute_tensor(right, mine.device_mesh, mine.placements, src_data_rank=None)
            mine, right = mine.to_local(), right.to_local()
        wrong += [] if torch.equal(mine, right) else [key]
    count = len(list(whole.parameters()))
    print(f"{name}, {kind}=2, rank {dist.get_rank()}: {len(wrong)} of {count} weights are not "
          f"those that were saved: {wrong[:2]}", flush=True)  # fmt: skip
    dist.barrier()
os._exit(0)
