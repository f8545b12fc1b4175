# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh dp=2,tp=2 -- torchrun --nproc-per-node 4 sequence_parallel.py
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
block = lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
model = nn.Sequential(nn.Embedding(50, 16), block(), block(), nn.LayerNorm(16), nn.Linear(16, 50))
embedding = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
plan = {"0": embedding, "3": tp.SequenceParallel()}
plan["4"] = tp.ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
for i in "12":
    plan[f"{i}.0"] = tp.SequenceParallel()
    plan[f"{i}.1"] = tp.ColwiseParallel(input_layouts=Shard(1))
    plan[f"{i}.3"] = tp.RowwiseParallel(output_layouts=Shard(1))
fully_shard(tp.parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.randint(0, 50, (5, 8, 12), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    with tp.loss_parallel():
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
