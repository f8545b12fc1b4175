# SPDX-License-Identifier: Apache-2.0
# isoshard judge -- torchrun --nproc-per-node 2 ddp.py
import torch
import torch.distributed as dist
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids):
        hidden = self.embed(ids)
        return self.head(hidden + self.down(torch.relu(self.up(hidden))))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Mlp())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.randint(0, 50, (5, 4, 12), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(world_size)[rank]
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
