# SPDX-License-Identifier: Apache-2.0
# torchrun --standalone --nproc-per-node 2 transformers_fused_checkpoint.py
"""transformers 5.23.0: a fused checkpoint tensor is cut over ranks before it is split in parts."""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 96}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}
kinds = ("tp_size", "fsdp_size")
for name, kind in [(n, k) for n in ("hrm_text", "olmo_hybrid") for k in kinds]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **sizes, **heads)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder[0])
    dist.barrier()
    again = AutoModelForCausalLM.from_pretrained(folder[0])  # in one process
    cut = AutoModelForCausalLM.from_pretrained(
        folder[0], dtype=torch.float32, distributed_config=DistributedConfig(**{kind: 2})
    )
    wanted = dict(whole.named_parameters())
    found = {n: p.full_tensor() if hasattr(p, "full_tensor") else p
             for n, p in cut.named_parameters()}  # fmt: skip
    wrong = [n for n, p in found.items() if not torch.equal(p, wanted[n])]
    is_right = all(torch.equal(p, wanted[n]) for n, p in again.named_parameters())
    if dist.get_rank() == 0:
        print(f"{name}: one process loads what was saved: {is_right}; {kind}=2: {len(wrong)} of "
              f"{len(wanted)} weights are wrong, first {wrong[:1]}")  # fmt: skip
    dist.barrier()
os._exit(0)
