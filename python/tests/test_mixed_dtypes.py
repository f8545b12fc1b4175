# SPDX-License-Identifier: Apache-2.0
"""Autocast that only some ranks enter: dtypes of a record that differ between ranks are found."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from live_models import LIVE, Blocks, adamw, ids_of
from torch import nn

import isoshard

pytestmark = LIVE
IDS = ids_of(8, 6)


class Cast(Blocks):
    """Under autocast to bf16, as long as `casts` is true."""

    def __init__(self, casts: bool) -> None:
        super().__init__(16, 32)
        self.casts = casts

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.casts):
            return super().forward(ids)


def ddp(model: Any, mesh: Any, casts: dict[int, bool]) -> nn.Module:
    """`casts` has ranks that do not do as the reference does."""
    model.casts = casts.get(mesh.get_rank(), model.casts)
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def judged(reference_casts: bool, casts: dict[int, bool]) -> tuple[isoshard.Report, dict[str, Any]]:
    report = isoshard.check(
        functools.partial(Cast, reference_casts),
        functools.partial(ddp, casts=casts),
        mesh="dp=2",
        batch=IDS,
        optimizer=adamw,
        raises=False,
    )
    return report, report.data["cases"][0]


# A rank without autocast is more exact than it must be: its numbers are within all tolerances.
@pytest.mark.parametrize(("odd_rank", "reference_casts"), [(0, True), (1, True), (1, False)])
def test_autocast_on_one_rank_is_found(odd_rank: int, reference_casts: bool) -> None:
    report, case = judged(reference_casts, {odd_rank: not reference_casts})

    assert report.exit_code == 1 and not report.conforms, report.text
    first = case["findings"][0]
    assert (first["kind"], first["name"], first["ranks"]) == (
        "activation",
        "layers.0.up",
        [odd_rank],
    )
    casting = odd_rank if not reference_casts else 1 - odd_rank
    assert f"bf16 on rank {casting}" in first["diagnosis"]
    assert f"fp32 on rank {1 - casting}" in first["diagnosis"]


@pytest.mark.parametrize("casts", [True, False])
def test_autocast_on_all_ranks_or_none_conforms(casts: bool) -> None:
    report, case = judged(casts, {})

    assert report.exit_code == 0, report.text
    assert not any("another dtype" in note for note in case["notes"])


def test_autocast_on_all_ranks_beside_a_reference_without_it_is_noted() -> None:
    _, case = judged(False, {0: True, 1: True})

    assert not any("dtype differs between ranks" in f["diagnosis"] for f in case["findings"])
    assert sum("another dtype than in the reference" in note for note in case["notes"]) == 1
