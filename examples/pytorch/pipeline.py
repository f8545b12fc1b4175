# SPDX-License-Identifier: Apache-2.0
# isoshard judge --mesh dp=2,pp=2 -- torchrun --nproc-per-node 4 pipeline.py    (or pp=2, 2 ranks)
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
dp, pp = max(1, dist.get_world_size() // 2), min(2, dist.get_world_size())
mesh = init_device_mesh("cpu", (dp, pp), mesh_dim_names=("dp", "pp"))
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(4)]
model = nn.Sequential(nn.Embedding(50, 16), *layers, nn.Linear(16, 50))
rank, size = mesh["pp"].get_local_rank(), len(model) // pp
part = nn.Sequential(OrderedDict(list(model.named_children())[rank * size : (rank + 1) * size]))
part = nn.parallel.DistributedDataParallel(part, process_group=mesh["dp"].get_group())
stage = PipelineStage(part, rank, pp, torch.device("cpu"), group=mesh["pp"].get_group())
loss_fn = lambda logits, ids: nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
data = torch.randint(0, 50, (5, 8, 12), generator=torch.Generator().manual_seed(5))
for batch in data:
    ids = batch.chunk(dp)[mesh["dp"].get_local_rank()]
    schedule.step(*((ids,) if stage.is_first else ()), target=ids)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
