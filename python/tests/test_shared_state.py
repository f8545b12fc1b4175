# SPDX-License-Identifier: Apache-2.0
"""ZeroRedundancyOptimizer: each rank has the states of some parameters, and steps them for all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from isoshard import Report

pytestmark = pytest.mark.usefixtures("judge_program")
IDS = torch.randint(0, 50, (12, 7), generator=torch.Generator().manual_seed(1))


def build() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50))


def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def shared_out(parameters: Any) -> torch.optim.Optimizer:
    """One process has no ranks to share with."""
    if not torch.distributed.is_initialized():
        return torch.optim.AdamW(parameters, lr=1e-3)
    optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
        parameters, optimizer_class=torch.optim.AdamW, lr=1e-3
    )
    return optimizer


def other_moments(parameters: Any) -> torch.optim.Optimizer:
    """Rank 1's moments are scaled after the step."""
    optimizer: Any = shared_out(parameters)
    if not torch.distributed.is_initialized():
        return optimizer  # type: ignore[no-any-return]
    step = optimizer.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if torch.distributed.get_rank() == 1:
            for state in optimizer.optim.state.values():
                state["exp_avg"].mul_(1.5)
        return result

    optimizer.step = stepped
    return optimizer  # type: ignore[no-any-return]


def not_sent(parameters: Any) -> torch.optim.Optimizer:
    """Stepped parameters stay on the rank that stepped them."""
    optimizer: Any = shared_out(parameters)
    if torch.distributed.is_initialized():
        optimizer._sync_params = lambda: None
    return optimizer  # type: ignore[no-any-return]


def judged(check: Callable[..., Report], optimizer: Callable[..., Any]) -> Report:
    return check(
        build,
        ddp,
        mesh={"dp": 2},
        batch=IDS,
        loss=loss,
        optimizer=optimizer,
        steps=2,
        raises=False,
    )


def test_states_that_ranks_share_out_conform(isoshard_check: Callable[..., Report]) -> None:
    report = judged(isoshard_check, shared_out)

    assert report.conforms, report.text


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [(other_moments, "exp_avg"), (not_sent, "first parameter after step")],
)
def test_faults_of_shared_states_are_found(
    isoshard_check: Callable[..., Report], optimizer: Callable[..., Any], words: str
) -> None:
    report = judged(isoshard_check, optimizer)

    assert report.exit_code == 1, report.text
    assert words in report.verdict


def of_this_rank(parameters: Any, *, dropped: int = 0, fault: str = "") -> torch.optim.Optimizer:
    """AdamW over every second parameter, which sends it to the other rank after a step.

    `dropped` parameters are stepped by no rank.
    """
    whole = list(parameters)
    if not torch.distributed.is_initialized():
        return torch.optim.AdamW(whole, lr=1e-3)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    optimizer = torch.optim.AdamW(whole[dropped:][rank::size], lr=1e-3)

    def send(*_: Any) -> None:
        if fault == "moments" and rank == 1:
            for state in optimizer.state.values():
                state["exp_avg"].mul_(1.5)
        for i, parameter in enumerate(whole[dropped:]):
            if fault != "not sent" or i > 0:
                torch.distributed.broadcast(parameter.data, i % size)
        for parameter in whole:
            parameter.grad = None

    optimizer.register_step_post_hook(send)
    return optimizer


def test_an_optimizer_that_is_shared_out_by_hand_conforms(
    isoshard_check: Callable[..., Report],
) -> None:
    report = judged(isoshard_check, of_this_rank)

    assert report.conforms, report.text


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"fault": "moments"}, "1.weight.exp_avg"),
        ({"fault": "not sent"}, "0.weight"),
        ({"dropped": 1}, "0.weight.exp_avg"),
    ],
)
def test_faults_of_an_optimizer_that_is_shared_out_by_hand_are_found(
    isoshard_check: Callable[..., Report], options: dict[str, Any], name: str
) -> None:
    report = judged(isoshard_check, functools.partial(of_this_rank, **options))

    assert report.exit_code == 1, report.text
    assert report.data["cases"][0]["findings"][0]["name"] == name
