# SPDX-License-Identifier: Apache-2.0
"""What tests of `isoshard.check` share: a block, a model of two blocks, optimizers, a right run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from isoshard import Report

LIVE = [pytest.mark.live, pytest.mark.usefixtures("judge_program")]
Check = Callable[..., Report]


def ids_of(samples: int, positions: int) -> torch.Tensor:
    """Tokens of a vocabulary of 50."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 50, (samples, positions), generator=generator)


class Block(nn.Module):
    """A residual block: norm, up, gelu, down."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Embedding, two blocks and a head; the output is the loss of predicting its own input."""

    def __init__(self, width: int, inner: int, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList([Block(width, inner), Block(width, inner)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return loss_of(self.head(self.last(x)).float(), ids)

    def last(self, x: torch.Tensor) -> torch.Tensor:
        """What stands between the blocks and the head."""
        return x


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def conforms(check: Check, build: Any, parallelize: Any, **options: Any) -> Report:
    """The report of a right run, which must conform within tolerance."""
    report = check(build, parallelize, **options)
    assert report.verdict.startswith("CONFORMS (within tolerance)"), report.text
    return report
