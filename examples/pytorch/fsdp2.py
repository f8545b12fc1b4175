# SPDX-License-Identifier: Apache-2.0
# isoshard judge -- torchrun --nproc-per-node 3 fsdp2.py        (rows do not divide by 3)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(20, 2, 40, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(50, 20), *layers, nn.Linear(20, 50))
mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.randint(0, 50, (5, 6, 12), generator=torch.Generator().manual_seed(5))
for batch in data:
    ids = batch[rank::world_size]  # as DistributedSampler deals samples out
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
