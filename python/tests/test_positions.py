# SPDX-License-Identifier: Apache-2.0
"""Embeddings of positions under data parallelism: their gradient is a sum over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from isoshard import Report

IDS = torch.randint(0, 50, (12, 7), generator=torch.Generator().manual_seed(1))


class Positions(nn.Module):
    """Embeddings of positions have no batch dim, or one of size 1."""

    def __init__(self, has_batch_dim: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(50, 16), nn.Embedding(7, 16)
        self.head, self.has_batch_dim = nn.Linear(16, 50), has_batch_dim

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = torch.arange(ids.shape[1])
        places = self.positions(at[None] if self.has_batch_dim else at)
        logits = self.head(self.embed(ids) + places)
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def scaled(model: nn.Module, mesh: Any) -> nn.Module:
    """Positions whose gradient is doubled on rank 1 on its way."""
    if mesh.get_rank() == 1:

        def double(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda grad: 2 * grad)

        model.positions.register_forward_hook(double, prepend=True)
    return ddp(model, mesh)


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("has_batch_dim", [False, True])
def test_positions_of_data_parallel_ranks_conform(
    isoshard_check: Callable[..., Report], has_batch_dim: bool, micro_batches: int
) -> None:
    def judged(parallelize: Callable[..., Any]) -> Report:
        return isoshard_check(
            lambda: Positions(has_batch_dim),
            parallelize,
            mesh={"dp": 2},
            batch=IDS,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            micro_batches=micro_batches,
            raises=False,
        )

    right, wrong = judged(ddp), judged(scaled)

    assert right.conforms, right.text
    assert not wrong.conforms
    assert "first gradient at positions" in wrong.verdict
