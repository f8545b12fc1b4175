# SPDX-License-Identifier: Apache-2.0
# pytest test_my_model.py
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

IDS = torch.randint(0, 50, (8, 12), generator=torch.Generator().manual_seed(1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids):
        hidden = self.embed(ids)
        logits = self.head(hidden + self.down(torch.relu(self.up(hidden))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def parallelize(model, mesh):
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_it_computes_what_one_process_computes(isoshard_check, micro_batches):
    mesh = {"dp": 2, "tp": 2}
    isoshard_check(
        Mlp, parallelize, mesh=mesh, batch=IDS, optimizer=adamw, micro_batches=micro_batches
    )
