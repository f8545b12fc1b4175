# SPDX-License-Identifier: Apache-2.0
"""Key and value heads that are fewer than tensor-parallel ranks: neighbours hold copies of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from isoshard import Divergence, Report
from isoshard._mesh import Mesh
from isoshard._places import readings_of

Check = Callable[..., Report]
IDS = torch.randint(0, 50, (4, 7), generator=torch.Generator().manual_seed(1))
HEADS, SIZE = 4, 4


class Attention(nn.Module):
    """Grouped-query attention with two heads of keys and values for four of queries."""

    def __init__(self, key_heads: int = 2) -> None:
        super().__init__()
        self.key_heads, self.group = key_heads, None
        self.q, self.o = nn.Linear(16, HEADS * SIZE), nn.Linear(HEADS * SIZE, 16, bias=False)
        self.k, self.v = nn.Linear(16, key_heads * SIZE), nn.Linear(16, key_heads * SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            x = Summed.apply(x, self.group, False)
        q, k, v = (
            part(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / SIZE**0.5, -1) @ v
        out = self.o(mixed.transpose(1, 2).flatten(2))
        return out if self.group is None else Summed.apply(out, self.group, True)


class Summed(torch.autograd.Function):
    """An all-reduce in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, is_forward: bool) -> torch.Tensor:
        ctx.group, ctx.is_forward = group, is_forward
        x = x.clone()
        if is_forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        if not ctx.is_forward:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(50, 16), Attention(), nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        logits = self.head(x + self.attention(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def keep(linear: nn.Linear, rows: slice | None, columns: slice | None = None) -> None:
    with torch.no_grad():
        if rows is not None:
            linear.weight = nn.Parameter(linear.weight[rows].clone())
            linear.bias = nn.Parameter(linear.bias[rows].clone())
        if columns is not None:
            linear.weight = nn.Parameter(linear.weight[:, columns].clone())


def one_head_each(model: nn.Module, mesh: Any, *, is_reduced: bool, is_turned: bool) -> None:
    """One query head for each of four ranks; ranks 0 and 1 share a key head, and 2 and 3."""
    rank, attention = mesh.get_rank(), model.get_submodule("attention")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own, pair = slice(rank * SIZE, (rank + 1) * SIZE), rank // 2
    head = 1 - pair if is_turned else pair
    shared = slice(head * SIZE, (head + 1) * SIZE)
    keep(attention.q, own)
    keep(attention.o, None, own)
    for linear in (attention.k, attention.v):
        keep(linear, shared)
        for parameter in linear.parameters() if is_reduced else []:
            parameter.register_post_accumulate_grad_hook(
                lambda p: dist.all_reduce(p.grad, group=pairs[pair])
            )
    attention.group = mesh.get_group("tp")


def right(model: nn.Module, mesh: Any) -> None:
    one_head_each(model, mesh, is_reduced=True, is_turned=False)


def gradients_of_copies_not_summed(model: nn.Module, mesh: Any) -> None:
    one_head_each(model, mesh, is_reduced=False, is_turned=False)


def pairs_with_each_others_head(model: nn.Module, mesh: Any) -> None:
    one_head_each(model, mesh, is_reduced=True, is_turned=True)


#: The output projection's own output is a sum that the attention makes behind it.
SUMMED = {"activation/attention.o": {"tp": "sum"}}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_neighbours_hold_the_same_part_or_ranks_take_turns() -> None:
    readings = readings_of([[4, 8]] * 4, [8, 8], Mesh({"tp": 4}), "param")
    assert [[o[0] for o in r.offsets] for r in readings] == [[0, 0, 4, 4], [0, 4, 0, 4]]
    assert all(r.shared == "tp" for r in readings)


@pytest.mark.parametrize("local", [[3, 8], [8, 8], [2, 8]])
def test_what_is_whole_or_cut_by_all_ranks_has_no_copied_parts(local: list[int]) -> None:
    readings = readings_of([local] * 4, [8, 8], Mesh({"tp": 4}), "param")
    assert all(r.shared is None for r in readings)


@pytest.mark.live
@pytest.mark.usefixtures("judge_program")
def test_copied_heads_conform(isoshard_check: Check) -> None:
    report = isoshard_check(Model, right, mesh="tp=4", batch=IDS, optimizer=sgd, layouts=SUMMED)
    assert report.conforms


@pytest.mark.live
@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(
    ("parallelize", "words"),
    [
        (gradients_of_copies_not_summed, "first gradient of attention.k"),
        (pairs_with_each_others_head, "first weight as read attention.k"),
    ],
)
def test_a_fault_of_copied_heads_is_found(
    isoshard_check: Check, parallelize: Any, words: str
) -> None:
    with pytest.raises(Divergence, match=words):
        isoshard_check(Model, parallelize, mesh="tp=4", batch=IDS, optimizer=sgd, layouts=SUMMED)
