# SPDX-License-Identifier: Apache-2.0
"""What a script does to gradients after backward: it completes them, or clips them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from isoshard._gradient_watch import GradientWatch

Parameters = list[torch.nn.Parameter]


@pytest.fixture
def parameters() -> Parameters:
    """Two parameters with gradients whose norm is 5."""
    made = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(2, 2))]
    made[0].grad, made[1].grad = torch.full((4,), 1.5), torch.full((2, 2), -2.0)
    return made


def watched(parameters: Parameters) -> GradientWatch:
    """A watch that looks."""
    watch = GradientWatch(lambda: [(str(i), p) for i, p in enumerate(parameters)])
    watch.begin()
    return watch


def test_a_factor_of_the_norm_clips(parameters: Parameters) -> None:
    watch = watched(parameters)

    norm = torch.stack([p.grad.norm() for p in parameters]).norm()  # type: ignore[union-attr]
    for p in parameters:
        p.grad.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))  # type: ignore[union-attr]
    watch.pause()

    assert watch.norm() == pytest.approx(5.0)
    assert torch.equal(watch.before["0"], torch.full((4,), 1.5))
    assert torch.equal(watch.before["1"], torch.full((2, 2), -2.0))


def test_a_constant_factor_completes_gradients(parameters: Parameters) -> None:
    watch = watched(parameters)

    for p in parameters:
        p.grad /= 2  # type: ignore[operator]
        p.grad.mul_(torch.tensor(0.5))  # type: ignore[union-attr]
    watch.pause()

    assert (watch.has_clipped, watch.before, watch.norm()) == (False, {}, None)


@pytest.mark.parametrize(
    ("limit", "is_clipped"), [(1.0, True), (0.25, True), (0.1234567, False), (1.654321, False)]
)
@pytest.mark.parametrize("is_in_place", [True, False])
def test_a_number_of_python_clips_if_it_is_a_limit_over_the_norm(
    parameters: Parameters, limit: float, is_clipped: bool, is_in_place: bool
) -> None:
    watch = watched(parameters)

    norms = [p.grad.norm() for p in parameters]  # type: ignore[union-attr]
    norm = torch.stack(norms).norm().item()
    for p in parameters:
        if is_in_place:
            p.grad *= limit / norm  # type: ignore[operator]
        else:
            p.grad = p.grad * (limit / norm)  # type: ignore[operator]
    watch.pause()
    watch.see_replaced()

    clipped, scaled = ({"0", "1"}, set()) if is_clipped else (set(), {"0", "1"})
    assert watch.has_clipped == is_clipped
    assert (set(watch.before), set(watch.scaled)) == (clipped, scaled)


def test_sparse_gradients_may_be_assigned(parameters: Parameters) -> None:
    parameters[0].grad = torch.full((4,), 1.5).to_sparse()
    watch = watched(parameters)

    parameters[0].grad = parameters[0].grad.coalesce() * 0.5
    watch.pause()
    watch.see_replaced()

    assert (watch.has_clipped, watch.before) == (False, {})


def test_gradients_that_are_written_over_are_complete_after_that(parameters: Parameters) -> None:
    watch = watched(parameters)

    norm = torch.stack([p.grad.norm() for p in parameters]).norm()  # type: ignore[union-attr]
    for p in parameters:
        p.grad.mul_(0.5 / norm)  # type: ignore[union-attr]
        p.grad.copy_(torch.arange(4.0).view_as(p))  # type: ignore[union-attr]
    watch.pause()

    assert (watch.has_clipped, watch.before, watch.norm()) == (False, {}, None)


def test_a_gradient_that_is_assigned_is_seen(parameters: Parameters) -> None:
    watch = watched(parameters)

    parameters[0].grad = parameters[0].grad.clamp(-1, 1)  # type: ignore[union-attr]
    watch.pause()
    watch.see_replaced()

    assert watch.has_clipped
    assert torch.equal(watch.before["0"], torch.full((4,), 1.5))
    assert "1" not in watch.before


def test_a_limit_that_changes_nothing_is_a_clipping(parameters: Parameters) -> None:
    watch = watched(parameters)

    torch._foreach_clamp_max_([p.grad for p in parameters], 10.0)  # type: ignore[misc]
    watch.pause()

    assert watch.has_clipped


def test_modes_of_the_script_may_end_while_it_looks(parameters: Parameters) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        watch = watched(parameters)

    assert _get_current_dispatch_mode_stack() == [watch]
    watch.end()
    assert _get_current_dispatch_mode_stack() == []


def traced() -> None:
    make_fx(lambda x: x * 2, tracing_mode="fake")(torch.ones(4))


def nested() -> None:
    torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided) * 2


def of_a_subclass() -> None:
    (TwoTensor(torch.ones(4), torch.ones(4)) * 2).sum()


@pytest.mark.parametrize("compute", [traced, nested, of_a_subclass])
def test_tensors_without_memory_of_their_own_are_let_through(
    parameters: Parameters, compute: Callable[[], None]
) -> None:
    watch = watched(parameters)

    compute()
    watch.pause()

    assert (watch.has_clipped, watch.norm()) == (False, None)
