# SPDX-License-Identifier: Apache-2.0
"""Perturbed runs compute products in pieces, as ranks with few samples do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import isoshard
from isoshard import Report
from isoshard._pieces import compute_in_pieces

Check = Callable[..., Report]


@pytest.mark.parametrize("shape", [(2, 5), (3, 16, 5), (70, 5), (5,)])
@pytest.mark.parametrize("outputs", [1, 3, 9, 80])
@pytest.mark.parametrize("has_bias", [False, True])
def test_pieces_are_the_product(shape: tuple[int, ...], outputs: int, has_bias: bool) -> None:
    """Whole numbers, so that the order of a sum does not matter."""
    generator = torch.Generator().manual_seed(3)

    def whole(*of: int) -> torch.Tensor:
        return torch.randint(-9, 9, of, generator=generator).double().requires_grad_()

    x, weight, bias = whole(*shape), whole(outputs, 5), whole(outputs) if has_bias else None
    inputs = [t for t in (x, weight, bias) if t is not None]
    wanted = F.linear(x, weight, bias)
    upstream = whole(*wanted.shape).detach()
    wanted_gradients = torch.autograd.grad(wanted, inputs, upstream)

    undo = compute_in_pieces(lambda: True)
    try:
        got = F.linear(x, weight, bias)
    finally:
        undo()

    assert torch.equal(got, wanted)
    gradients = torch.autograd.grad(got, inputs, upstream)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert torch.equal(gradient, wanted_gradient)


def test_a_product_in_pieces_is_no_view() -> None:
    """Hooks on the gradient of a view are lost where the script changes it in place."""
    linear, seen = nn.Linear(5, 3), []
    undo = compute_in_pieces(lambda: True)
    try:
        out = linear(torch.ones(2, 4, 5))
    finally:
        undo()
    out.register_hook(seen.append)
    out.add_(1)

    out.sum().backward()

    assert len(seen) == 1


def test_pieces_of_addmm_are_the_product() -> None:
    x, weight, bias = (torch.randint(-9, 9, s).double() for s in [(7, 5), (5, 3), (3,)])
    wanted = torch.addmm(bias, x, weight)
    undo = compute_in_pieces(lambda: True)
    try:
        assert torch.equal(torch.addmm(bias, x, weight), wanted)
        assert torch.equal(torch.addmm(bias, x, weight, beta=2), wanted + bias)
    finally:
        undo()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_shifted_logits_have_the_same_loss(dtype: torch.dtype, reduction: str) -> None:
    masked = torch.tensor([[14.1, 2.3, -math.inf], [0.7, 0.1, -1e9], [9.0, 9.0, 9.0]], dtype=dtype)
    others = 5 * torch.randn(16, 3, generator=torch.Generator().manual_seed(2), dtype=dtype)
    logits = torch.cat([masked, others]).requires_grad_()
    target, eps = torch.tensor([0, 1, -100] + 16 * [2]), torch.finfo(dtype).eps
    wanted = F.cross_entropy(logits, target, reduction=reduction)
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), logits)

    undo = compute_in_pieces(lambda: True)
    try:
        got = F.cross_entropy(logits, target, reduction=reduction)
    finally:
        undo()

    (gradient,) = torch.autograd.grad(got.sum(), logits)
    torch.testing.assert_close(got, wanted, rtol=32 * eps, atol=32 * eps)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=32 * eps)
    assert not torch.equal(gradient, wanted_gradient)


def test_products_outside_of_the_model_stay() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(s, generator=generator) for s in [(2, 4096), (3, 4096)])
    wanted = F.linear(x, weight)
    undo = compute_in_pieces(lambda: False)
    try:
        assert torch.equal(F.linear(x, weight), wanted)
    finally:
        undo()


@pytest.mark.parametrize(("perturb", "is_cut"), [(None, False), (1000, True)])
def test_perturbed_runs_alone_compute_in_pieces(
    tmp_path: Path, perturb: int | None, is_cut: bool
) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    original = F.linear

    with isoshard.record(tmp_path / "run", model, optimizer, perturb=perturb):
        assert (F.linear is not original) == is_cut
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    assert F.linear is original


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def test_what_is_checkpointed_is_made_again_in_pieces(tmp_path: Path) -> None:
    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isoshard.record(tmp_path / "run", model, optimizer, perturb=1000):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()


def test_functions_are_put_back_after_an_error(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    functions = (F.linear, F.cross_entropy, torch.addmm, torch.optim.Optimizer.zero_grad)

    def rename(name: str) -> str:
        raise ValueError(name)

    with (
        pytest.raises(Exception, match="weight"),
        isoshard.record(tmp_path / "run", model, optimizer, perturb=1000, rename=rename),
    ):
        pass

    assert (F.linear, F.cross_entropy, torch.addmm, torch.optim.Optimizer.zero_grad) == functions


class Classifier(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), y)


def ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize("seed", [17, 24, 47, 50, 58])
def test_products_of_one_row_need_runs_in_pieces(isoshard_check: Check, seed: int) -> None:
    draw = random.Random(seed)
    width, outputs = draw.choice([512, 1024, 2048, 4096]), draw.choice([2, 3, 5])
    dtype = draw.choice([torch.float32, torch.float64])
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, width, generator=generator).to(dtype)
    y = torch.randint(0, outputs, (2,), generator=generator)

    report = isoshard_check(
        lambda: Classifier(width, outputs).to(dtype),
        ddp,
        mesh="dp=2",
        batch={"x": x, "y": y},
        optimizer=sgd,
        loss=lambda out, batch: out,
        steps=2,
        raises=False,
    )

    assert report.conforms, report.verdict
