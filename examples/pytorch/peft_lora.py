# SPDX-License-Identifier: Apache-2.0
# isoshard judge -- torchrun --nproc-per-node 2 peft_lora.py --wrap ddp        (or fsdp2)
import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

dist.init_process_group("gloo")
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 251}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
config = AutoConfig.for_model("qwen2", **sizes, **heads, use_cache=False)
base = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
if sys.argv[2] == "fsdp2":
    for layer in [*base.model.layers, model]:
        fully_shard(layer)
else:
    model = DistributedDataParallel(model)
trained = [p for p in model.parameters() if p.requires_grad]  # the adapters; all else is frozen
optimizer = torch.optim.AdamW(trained, lr=1e-2)
for batch in torch.randint(0, 251, (3, 4, 32), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(dist.get_world_size())[dist.get_rank()]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
