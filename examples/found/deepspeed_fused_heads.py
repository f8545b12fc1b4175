# SPDX-License-Identifier: Apache-2.0
# torchrun --standalone --nproc-per-node 2 deepspeed_fused_heads.py
"""DeepSpeed 0.19.8, AutoTP: q, k and v of each of persimmon's heads are cut as if q came first."""

import copy
import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

deepspeed.init_distributed("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 96}
ids = torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(1))
for name in ("gpt_neox", "persimmon"):
    torch.manual_seed(0)
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0}
    config = AutoConfig.for_model(name, **sizes, num_attention_heads=4, **dropouts)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = deepspeed.tp_model_init(copy.deepcopy(whole), tp_size=world, dtype=torch.float32)
    settings = {"train_batch_size": 4, "tensor_parallel": {"autotp_size": world}}
    engine = deepspeed.initialize(model=model, config=settings)[0]
    cut = {n: p.detach() for n, p in engine.module.named_parameters() if "query_key_value.w" in n}
    for key, mine in cut.items():
        right = whole.get_parameter(key).detach().chunk(world)[rank]  # both lie head by head
        others = sum(not (right == row).all(1).any() for row in mine)
        print(f"{name}, rank {rank}, {key}: {others} of {len(mine)} rows are of heads of another "
              "rank", flush=True)  # fmt: skip
    losses = [float(m(input_ids=ids, labels=ids).loss.detach()) for m in (whole, engine)]
    if rank == 0:
        print(f"{name}: loss {losses[1]:.6f}, right is {losses[0]:.6f}", flush=True)
    dist.barrier()
os._exit(0)
