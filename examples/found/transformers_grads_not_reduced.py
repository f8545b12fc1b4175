# SPDX-License-Identifier: Apache-2.0
# torchrun --standalone --nproc-per-node 2 transformers_grads_not_reduced.py
"""transformers 5.23.0, tp_plan: gradients that no plan reduces, or that are reduced twice."""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 96}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(1))
cases = [("apertus", {}, 1), ("glm4_moe", {"use_qk_norm": True}, 1)]
for name, more, micro_batches in [*cases, ("phi", {"qk_layernorm": True}, 1), ("qwen3", {}, 2)]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **sizes, **heads, **more)
    config.attention_dropout = config.resid_pdrop = config.embd_pdrop = 0.0
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder[0])
    dist.barrier()
    sharding = DistributedConfig(tp_size=2)
    cut = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=sharding).train()
    for part in ids.chunk(micro_batches):
        for model in (whole, cut):
            (model(input_ids=part, labels=part).loss / micro_batches).backward()
    for key, parameter in cut.named_parameters():
        mine, right = parameter.grad, whole.get_parameter(key).grad
        is_whole = mine is not None and not hasattr(mine, "full_tensor")
        if is_whole and not torch.allclose(mine, right, rtol=1e-3, atol=1e-6):
            print(f"{name} rank {dist.get_rank()} {key}: {mine.norm():.6f}, not {right.norm():.6f}")
os._exit(0)
