# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh dp=2,tp=2 -- torchrun --nproc-per-node 4 tensor_parallel.py --tp 2
import sys

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


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


model = nn.Sequential(nn.Embedding(50, 16), Mlp(), Mlp(), nn.Linear(16, 50))
for i in (1, 2):
    parallelize_module(model[i], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
for layer in model:
    fully_shard(layer, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randint(0, 50, (5, 8, 12), generator=torch.Generator().manual_seed(5))
for batch in data:
    ids = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    for part in ids.chunk(2):  # micro-batches
        loss = nn.functional.cross_entropy(model(part).flatten(0, 1), part.flatten()) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
