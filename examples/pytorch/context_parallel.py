# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh dp=2,cp=2 -- torchrun --nproc-per-node 4 context_parallel.py
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd as all_gather
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
cp, rank = mesh["cp"].size(), mesh["cp"].get_local_rank()
parts = torch.arange(12).chunk(2 * cp)  # balanced: a rank has a part of the head, one of the tail
order = [torch.cat([parts[r], parts[2 * cp - 1 - r]]) for r in range(cp)]
torch.manual_seed(0)


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        whole = all_gather(x, gather_dim=1, group=mesh["cp"])
        later = order[rank][:, None] < torch.cat(order)
        return super().forward(x, whole, whole, attn_mask=later, need_weights=False)[0]


model = nn.Sequential(nn.Embedding(50, 16), Attention(16, 2, batch_first=True), nn.Linear(16, 50))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.randint(0, 50, (5, 8, 12), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()][:, order[rank]]
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step(), optimizer.zero_grad()
