# SPDX-License-Identifier: Apache-2.0
# torchrun --standalone --nproc-per-node 3 transformers_fsdp_tied.py
"""transformers 5.23.0, fsdp_size: are tied embeddings still one parameter after loading?"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
size = dist.get_world_size()
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 97}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
for vocabulary in (96, 97):
    torch.manual_seed(0)
    sizes["vocab_size"] = vocabulary
    config = AutoConfig.for_model("llama", **sizes, **heads, tie_word_embeddings=True)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder[0])
    dist.barrier()
    cut = AutoModelForCausalLM.from_pretrained(
        folder[0], dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=size)
    ).train()  # fmt: skip
    ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(1))
    for model in (whole, cut):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    is_one = cut.lm_head.weight is cut.model.embed_tokens.weight
    head, embedding = (w.weight.full_tensor() for w in (cut.lm_head, cut.model.embed_tokens))
    if dist.get_rank() == 0:
        right = whole.lm_head.weight
        print(f"vocabulary {vocabulary}, {size} ranks: one parameter: {is_one}; after a step the "
              f"head is off by {(head - right).abs().max():.1e}, the embedding by "
              f"{(embedding - right).abs().max():.1e}")  # fmt: skip
os._exit(0)
