# SPDX-License-Identifier: Apache-2.0
"""Names of parameters in wrapped models, and optimizers of parameters that were replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import isoshard
from isoshard import RecordError, _bundle
from isoshard._checks import replaced_parameters
from isoshard._names import compiled_root, named_modules, named_parameters, own_class, unwrapped
from isoshard.errors import NotTrained


class Tied(nn.Module):
    """An embedding and a head of one shape, between them a block of two matrices of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.block = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(ids)))


def compiled(module: nn.Module) -> nn.Module:
    result = torch.compile(module, backend="eager")
    assert isinstance(result, nn.Module)
    return result


# -- names ---------------------------------------------------------------------------------------


Wrap = Callable[[nn.Module], nn.Module]


@pytest.mark.parametrize("around", [[], [compiled, checkpoint_wrapper], [checkpoint_wrapper] * 2])
@pytest.mark.parametrize("inside", [compiled, checkpoint_wrapper])
@pytest.mark.parametrize("step", [1, -1])
def test_wrappers_in_any_order_change_no_name(around: list[Wrap], inside: Wrap, step: int) -> None:
    model = Tied()
    parameters = dict(model.named_parameters())
    modules = {name for name, _ in model.named_modules()}
    model.block = inside(model.block)  # type: ignore[assignment]
    whole: nn.Module = model
    for wrap in around[::step]:
        whole = wrap(whole)

    assert dict(named_parameters(whole)) == parameters
    assert {name for name, _ in named_modules(whole)} == modules
    assert dict(named_parameters(unwrapped(whole))) == parameters


def test_a_child_that_the_user_calls_module_keeps_its_name() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert [name for name, _ in named_parameters(Mine())] == ["module.weight", "module.bias"]
    assert unwrapped(Mine()).get_submodule("module").in_features == 2  # type: ignore[union-attr]


def test_the_compiled_root_is_found_inside_of_a_wrapper() -> None:
    model = compiled(Tied())
    assert compiled_root(model) is model
    assert compiled_root(Tied()) is None
    assert own_class(unwrapped(model)) is Tied


# -- replaced parameters -------------------------------------------------------------------------


def replace(module: nn.Module, *names: str) -> None:
    for name in names:
        owner, _, last = name.rpartition(".")
        old = module.get_parameter(name)
        setattr(module.get_submodule(owner), last, nn.Parameter(old.detach().clone()))


def step(path: Path, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    with isoshard.record(path, model, optimizers):
        model(torch.arange(6)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize(
    ("names", "number"),
    [
        (["block.0.weight"], "1 parameter that Tied no longer has; it was"),
        (["block.0.weight", "head.weight"], "2 parameters that Tied no longer has; they were"),
    ],
)
def test_an_optimizer_with_some_replaced_parameters_is_refused_at_its_step(
    tmp_path: Path, names: list[str], number: str
) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replace(model, *names)
    with pytest.raises(NotTrained, match=f"The optimizer holds {number} replaced"):
        step(tmp_path / "a", model, optimizer)


def test_an_optimizer_of_replaced_parameters_alone_is_refused_at_once(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replace(model, *dict(model.named_parameters()))
    with pytest.raises(RecordError, match="4 other tensors, 4 of which have the shapes"):
        step(tmp_path / "a", model, optimizer)


def test_one_of_several_optimizers_with_replaced_parameters_is_refused(tmp_path: Path) -> None:
    model = Tied()
    first = torch.optim.SGD([model.head.weight, *model.block.parameters()], 0.1)
    replace(model, "block.1.weight")
    second = torch.optim.SGD(model.embed.parameters(), 0.1)
    with pytest.raises(NotTrained, match="holds 1 parameter"):
        step(tmp_path / "a", model, first, second)


def test_a_head_that_is_tied_after_the_optimizer_was_made_is_trained(tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.head.weight = model.embed.weight
    step(tmp_path / "a", model, optimizer)
    assert "param/outside.0/1" in _bundle.read_tensors(tmp_path / "a", 0, 0)


def test_what_was_never_in_the_model_was_not_replaced() -> None:
    model = Tied()
    model(torch.arange(6)).square().mean().backward()
    used, unused = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    used.grad = torch.ones(8, 8)
    others = [model.head.weight, model.embed.weight]

    def number(*held: torch.Tensor) -> int:
        return replaced_parameters(model, [torch.optim.SGD(held, 0.1)], has_gradients=True)

    # The block is in no optimizer. What has a gradient is used; a frozen one asks for none.
    assert number(*others, used) == 0
    assert number(*others, nn.Parameter(torch.ones(3, 3))) == 0
    assert number(*others, *model.block.parameters(), unused) == 0
    assert number(*others, unused) == 1
    model.block.zero_grad()  # as where the block is not called
    assert number(*others, unused) == 0
    model(torch.arange(6)).square().mean().backward()
    assert number(*others, unused) == 1
    model.block.requires_grad_(False)
    assert number(*others, unused) == 0
