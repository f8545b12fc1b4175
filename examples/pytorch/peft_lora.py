# SPDX-License-Identifier: Apache-2.0
# isoshard judge -- torchrun --nproc-per-node 2 peft_lora.py --wrap ddp        (or fsdp2)
import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tiny import batches_of, model_of
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
base = model_of("qwen2")
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
if sys.argv[2] == "fsdp2":
    for layer in [*base.model.layers, model]:
        fully_shard(layer)
else:
    model = DistributedDataParallel(model)
trained = [p for p in model.parameters() if p.requires_grad]  # the adapters; all else is frozen
optimizer = torch.optim.AdamW(trained, lr=1e-2)
for batch in batches_of(steps=3):
    ids = batch.chunk(dist.get_world_size())[dist.get_rank()]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
