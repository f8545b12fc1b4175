# SPDX-License-Identifier: Apache-2.0
"""Micro-batches as one record: samples are joined, what does not depend on them is added up."""

from __future__ import annotations

import pytest
import torch

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
        ([ROWS.reshape(2, 7)] * 2, [IDS[:2, :3], IDS[2:4, :3]]),
        ([ROWS.reshape(14, 1)] * 2, [IDS[:2, :3], IDS[2:4, :3]]),  # several rows for each sample
    ],
)
def test_other_outputs_are_joined(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    records = step(outputs, inputs)

    gradients = [ROWS.reshape(outputs[0].shape), 2 * ROWS.reshape(outputs[0].shape)]
    assert torch.equal(records["activation"], torch.cat(outputs))
    assert torch.equal(records["activation_grad"], torch.cat(gradients))


def test_gradients_are_counted_from_0_where_an_earlier_output_has_none() -> None:
    found = entries("activation_grad", [ROWS])
    found[0].record["call"] = 1

    assert [entry.record["call"] for entry in merged(found)] == [0]
