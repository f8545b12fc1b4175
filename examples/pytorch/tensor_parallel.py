# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh dp=2,tp=2 -- torchrun --nproc-per-node 4 tensor_parallel.py --tp 2
import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
tp = int(sys.argv[2])
mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
mlp = lambda: OrderedDict(up=nn.Linear(16, 32), relu=nn.ReLU(), down=nn.Linear(32, 16))
blocks = [nn.Sequential(mlp()), nn.Sequential(mlp())]
model = nn.Sequential(nn.Embedding(50, 16), *blocks, nn.Linear(16, 50))
for block in blocks:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
for layer in model:
    fully_shard(layer, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.randint(0, 50, (5, 8, 12), generator=torch.Generator().manual_seed(5)):
    for ids in batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].chunk(2):
        (nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
