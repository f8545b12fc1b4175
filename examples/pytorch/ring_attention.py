# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh dp=2,cp=2 -- torchrun --nproc-per-node 4 ring_attention.py [--contiguous]
import sys

import ring_on_cpu  # noqa: F401  (a machine with GPUs needs none)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options
from torch.nn import functional

dist.init_process_group("gloo")
cp = min(2, dist.get_world_size())
mesh = init_device_mesh("cpu", (dist.get_world_size() // cp, cp), mesh_dim_names=("dp", "cp"))
_cp_options.enable_load_balance = "--contiguous" not in sys.argv
torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(o.transpose(1, 2).flatten(2))


layers = nn.Embedding(50, 16), Attention(), Attention(), nn.Linear(16, 50)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.randint(0, 50, (5, 8, 12), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].clone()
    with context_parallel(mesh["cp"], buffers=[ids], buffer_seq_dims=[1]):
        functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step(), optimizer.zero_grad()
dist.destroy_process_group()
