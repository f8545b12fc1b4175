# SPDX-License-Identifier: Apache-2.0
"""The labels that torch's losses count, whatever else is around them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from isoshard._label_counts import LabelCounts

LOGITS = torch.zeros(4, 5)
LABELS = torch.tensor([1, -1, 2, -1])


@pytest.fixture
def counts() -> Iterator[LabelCounts]:
    found = LabelCounts()
    undo = found.install()
    found.micro = lambda: 0
    yield found
    undo()


def test_ignored_labels_do_not_count(counts: LabelCounts) -> None:
    F.cross_entropy(LOGITS, LABELS, ignore_index=-1)
    nn.NLLLoss(ignore_index=-1)(LOGITS.log_softmax(-1), LABELS)

    assert counts.take() == [4]
    assert counts.take() == []


def test_micro_batches_are_counted_apart(counts: LabelCounts) -> None:
    for micro, labels in ((1, LABELS[:1]), (0, LABELS[:3])):
        counts.micro = lambda micro=micro: micro
        F.cross_entropy(LOGITS[: len(labels)], labels, ignore_index=-1)

    assert counts.take() == [2, 1]


def test_function_modes_do_not_count_twice(counts: LabelCounts) -> None:
    with torch.device("cpu"), torch.device("cpu"):
        F.cross_entropy(LOGITS, LABELS, ignore_index=-1)

    assert counts.take() == [2]


def test_what_is_no_plain_class_index_is_left_out(counts: LabelCounts) -> None:
    F.cross_entropy(LOGITS, torch.full((4, 5), 0.2))
    torch.vmap(F.cross_entropy)(LOGITS[None], LABELS.clamp(min=0)[None])
    counts.micro = lambda: None
    F.cross_entropy(LOGITS, LABELS, ignore_index=-1)

    assert counts.take() == []


def test_the_functions_are_put_back() -> None:
    original = F.cross_entropy
    undo = LabelCounts().install()
    assert F.cross_entropy is not original
    undo()
    assert F.cross_entropy is original


COMPILED = """
import torch
from torch.nn import functional as F
from isoshard._label_counts import LabelCounts
counts = LabelCounts()
counts.install()
counts.micro = lambda: 0
step = torch.compile(lambda x, y: F.cross_entropy(x, y), fullgraph=True, backend="eager")
print(step(torch.zeros(4, 5), torch.tensor([1, 2, 3, 0])).item())
"""


def test_a_compiled_loss_is_one_graph() -> None:
    """The functions are replaced before torch.compile is imported, as in a judged script."""
    result = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=120, check=False
    )

    assert result.returncode == 0, result.stderr
