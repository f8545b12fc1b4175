# SPDX-License-Identifier: Apache-2.0
# torchrun --standalone --nproc-per-node 3 transformers_fsdp_tied.py
"""transformers 5.23.0, fsdp_size: a head that is tied and cut unevenly reads old weights."""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(1))
for is_tied, vocabulary in ((True, 96), (True, 97), (False, 97)):
    torch.manual_seed(0)
    rest = {**sizes, **heads, "vocab_size": vocabulary, "tie_word_embeddings": is_tied}
    config = AutoConfig.for_model("llama", **rest)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder[0])
    dist.barrier()
    sharding = DistributedConfig(fsdp_size=dist.get_world_size())
    cut = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=sharding).train()
    outputs = []
    for model in (whole, cut):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        outputs.append(model(input_ids=ids).logits.detach())
    off = (outputs[0] - outputs[1]).abs().amax((0, 1))
    rows = (off > 1e-4).nonzero().flatten().tolist()
    if dist.get_rank() == 0:
        print(f"tied {is_tied}, vocabulary {vocabulary}: largest error of logits after a step "
              f"{off.max():.1e}, in columns {rows[:1]} to {rows[-1:]}", flush=True)  # fmt: skip
os._exit(0)
