# SPDX-License-Identifier: Apache-2.0
"""Micro-batches as one record: samples are joined, what does not depend on them is added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from isoshard import Report
from isoshard._bundle import Entry
from isoshard._micro_batches import merged

IDS = torch.randint(0, 50, (12, 7), generator=torch.Generator().manual_seed(1))
ROWS = torch.arange(14.0).reshape(7, 2)


def entries(kind: str, micro_batches: list[torch.Tensor], name: str = "wpe") -> list[Entry]:
    return [
        Entry(
            {"kind": kind, "name": name, "call": 0, "local_shape": list(tensor.shape)},
            tensor,
            micro,
        )
        for micro, tensor in enumerate(micro_batches)
    ]


def step(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The records of two micro-batches whose gradients are ROWS and 2 ROWS, as they are written."""
    gradients = [ROWS.reshape(outputs[0].shape) * (i + 1) for i in range(len(outputs))]
    found = [
        *entries("data_id", inputs, "input_ids"),
        *entries("activation", outputs),
        *entries("activation_grad", gradients),
    ]
    return {entry.record["kind"]: entry.tensor for entry in merged(found)}


def test_an_output_that_does_not_depend_on_the_samples_is_one_record() -> None:
    records = step([ROWS, ROWS], [IDS[:4], IDS[4:8]])

    assert torch.equal(records["activation"], ROWS)
    assert torch.equal(records["activation_grad"], 3 * ROWS)
    assert records["data_id"].shape == (8, 7)


def test_sums_of_16_bits_are_kept_in_fp32() -> None:
    grads = [torch.full((7, 2), value, dtype=torch.bfloat16) for value in (256.0, 1.0)]
    found = [
        *entries("data_id", [IDS[:4], IDS[4:8]], "input_ids"),
        *entries("activation", [ROWS.bfloat16()] * 2),
        *entries("activation_grad", grads),
    ]

    record = merged(found)[-1]

    assert record.record["dtype"] == "fp32"
    assert torch.equal(record.tensor, torch.full((7, 2), 257.0))  # 256 in bf16


@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [
        ([ROWS, ROWS + 1], [IDS[:4], IDS[4:8]]),  # they do depend on them
        ([ROWS, ROWS], [IDS[:4], IDS[:4]]),  # the same samples twice
        ([ROWS * 0, ROWS * 0], [IDS[:4], IDS[4:8]]),  # such as a new adapter's
        ([ROWS, ROWS], [IDS[:7], IDS[5:12]]),  # as many rows as samples
        ([ROWS.T, ROWS.T], [IDS[:7], IDS[5:12]]),  # samples along dim 1
    ],
)
def test_other_outputs_are_joined(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    records = step(outputs, inputs)

    gradients = [ROWS.reshape(outputs[0].shape), 2 * ROWS.reshape(outputs[0].shape)]
    assert torch.equal(records["activation"], torch.cat(outputs))
    assert torch.equal(records["activation_grad"], torch.cat(gradients))


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
