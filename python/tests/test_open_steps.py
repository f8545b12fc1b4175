# SPDX-License-Identifier: Apache-2.0
"""A step stays open until the next forward pass: what a script does after it is recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_evidence import judged
from torch import nn

import isoshard
from isoshard import RecordError, Report, _bundle

BATCH = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def train(
    path: Path,
    *,
    steps: int = 2,
    most: int | None = None,
    begin: Callable[[nn.Module, torch.optim.Optimizer, int], None] = lambda m, o, i: None,
    end: Callable[[nn.Module, torch.optim.Optimizer, int], None] = lambda m, o, i: None,
) -> nn.Module:
    """Calls `begin` before each forward pass and `end` after each step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isoshard.record(path, model, optimizer, steps=most):
        for step in range(steps):
            begin(model, optimizer, step)
            model(BATCH).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            end(model, optimizer, step)
    return model


def read(path: Path, step: int, name: str) -> torch.Tensor:
    return _bundle.read_tensors(path, step, 0)[name]


@torch.no_grad()
def zero(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.zero_()


@pytest.mark.parametrize("most", [None, 1, 2])
def test_what_a_script_does_after_a_step_is_recorded(tmp_path: Path, most: int | None) -> None:
    train(tmp_path / "a", end=zero, steps=3, most=most)
    for step in _bundle.read_manifest(tmp_path / "a")["steps"]:
        call = 1 if step == 0 else 0
        assert not read(tmp_path / "a", step, f"param/0.weight/{call}").any()


def test_weights_that_a_script_exchanges_for_a_test_come_back(tmp_path: Path) -> None:
    def test(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        kept = [p.detach().clone() for p in model.parameters()]
        zero(model, optimizer, step)
        with torch.no_grad():
            model(BATCH)
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(value)

    train(tmp_path / "a", end=test)
    train(tmp_path / "b")
    for step, call in ((0, 1), (1, 0)):
        name = f"param/2.weight/{call}"
        assert torch.equal(read(tmp_path / "a", step, name), read(tmp_path / "b", step, name))


def test_a_layer_that_joins_later_is_refused_by_name(tmp_path: Path) -> None:
    def add(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            model.append(nn.Linear(6, 6))
            optimizer.add_param_group({"params": model[3].parameters()})

    with pytest.raises(RecordError, match=r"joined before step 1: 3\.weight, 3\.bias"):
        train(tmp_path / "a", begin=add)


def test_a_parameter_outside_that_joins_later_is_refused(tmp_path: Path) -> None:
    def add(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))]})

    with pytest.raises(RecordError, match=r"joined before step 1: \[3, 2\] of group 1"):
        train(tmp_path / "a", begin=add)


def test_a_parameter_of_the_model_may_join_an_optimizer_later(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    with isoshard.record(tmp_path / "a", model, optimizer):
        for step in range(2):
            if step == 1:
                optimizer.add_param_group({"params": model[2].parameters()})
            model(BATCH).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    name = "optimizer/2.weight.momentum_buffer/0"
    assert name not in _bundle.read_tensors(tmp_path / "a", 0, 0)
    assert read(tmp_path / "a", 1, name).any()


def scaler_skips(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(8 * model(BATCH).square().mean()).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()


def scaler_skips_what_is_clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(8 * model(BATCH).square().mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    optimizer.zero_grad(set_to_none=False)


def script_skips(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(BATCH * 3).square().mean().backward()
    model.zero_grad()


def evaluation(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(BATCH * 5)


NO_STEPS = [scaler_skips, scaler_skips_what_is_clipped, script_skips, evaluation]


@pytest.mark.parametrize("before", NO_STEPS)
@pytest.mark.parametrize("at", [0, 1])
def test_passes_that_no_step_reads_do_not_count(tmp_path: Path, before: Any, at: int) -> None:
    def begin(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == at:
            before(model, optimizer)

    train(tmp_path / "a", begin=begin)
    train(tmp_path / "b")

    for step in (0, 1):
        ours, wanted = (_bundle.read_tensors(tmp_path / side, step, 0) for side in "ab")
        assert list(ours) == list(wanted)
        for name, tensor in wanted.items():
            assert torch.equal(ours[name], tensor), name


def test_several_passes_before_one_backward_count(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isoshard.record(tmp_path / "a", model, optimizer):
        (model(BATCH) - model(BATCH * 2)).square().mean().backward()
        optimizer.step()
    assert len(read(tmp_path / "a", 0, "data_id/input_ids/0")) == 2 * len(BATCH)


def test_what_is_computed_in_front_of_the_model_is_an_activation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, prompt = Net(), nn.Parameter(torch.full((6,), 0.1))
    optimizer = torch.optim.SGD([*model.parameters(), prompt], lr=0.1)
    with isoshard.record(tmp_path / "a", model, optimizer):
        model(BATCH + prompt).square().mean().backward()
        optimizer.step()
    tensors = _bundle.read_tensors(tmp_path / "a", 0, 0)

    assert torch.equal(tensors["activation/input_ids/0"], BATCH + 0.1)
    assert "activation_grad/input_ids/0" in tensors
    assert not any(name.startswith("data_id/") for name in tensors)


# ranks


def shared_out(model: nn.Module, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Each rank steps every second parameter."""
    size, rank = mesh.size(), mesh.get_rank()
    own = [p for i, p in enumerate(model.parameters()) if i % size == rank]
    return model, torch.optim.SGD(own, lr=0.1)


def send_after_the_step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Any) -> None:
    for part in parts:
        model(part).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    model.zero_grad()
    for i, parameter in enumerate(model.parameters()):
        dist.broadcast(parameter.data, i % dist.get_world_size())


def send_nothing(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Any) -> None:
    send_after_the_step(model, optimizer, parts)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("0.bias").zero_()


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(("step", "code"), [(send_after_the_step, 0), (send_nothing, 1)])
def test_ranks_that_share_out_the_step_by_hand_conform(
    isoshard_check: Callable[..., Report], step: Any, code: int
) -> None:
    report = isoshard_check(
        Net,
        shared_out,
        mesh={"dp": 2},
        batch=BATCH,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda output, batch: output.square().mean(),
        step=step,
        raises=False,
    )
    assert report.exit_code == code


_CLEARED = """
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x in batches:
    for half in x.chunk(2):
        if {condition}:
            optimizer.zero_grad()
        part = half.chunk(world)[rank]
        (nn.functional.mse_loss(model(part), part.flip(1)) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(("condition", "code"), [("False", 0), ("True", 0), ("world > 1", 1)])
def test_a_micro_batch_that_ranks_alone_clear_is_found(
    tmp_path: Path, condition: str, code: int
) -> None:
    found, verdict = judged(tmp_path, _CLEARED.format(condition=condition))
    assert found == code, verdict["reason"]
    if code:
        assert verdict["findings"][0]["stage"] == "data ids"
        assert verdict["findings"][0]["cause"]["id"] == "given_cause"


def clears_each(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Any) -> None:
    for part in parts:
        optimizer.zero_grad()
        (model(part).square().mean() / len(parts)).backward()
    optimizer.step()
    optimizer.zero_grad()


def leaves_one_out(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Any) -> None:
    losses = [model(part).square().mean() / len(parts) for part in parts]
    losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()


def warms_up(model: nn.Module, optimizer: torch.optim.Optimizer, parts: Any) -> None:
    model(parts[0]).sum().backward()
    optimizer.zero_grad()
    for part in parts:
        (model(part).square().mean() / len(parts)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(("step", "code"), [(clears_each, 1), (leaves_one_out, 1), (warms_up, 0)])
def test_passes_that_ranks_alone_throw_away_are_told(
    isoshard_check: Callable[..., Report], step: Any, code: int
) -> None:
    report = isoshard_check(
        Net,
        lambda model, mesh: nn.parallel.DistributedDataParallel(model),
        mesh={"dp": 2},
        batch=BATCH,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=lambda output, batch: output.square().mean(),
        micro_batches=2,
        step=step,
        raises=False,
    )
    assert report.exit_code == code, report.text
    if code:
        (case,) = report.data["cases"]
        assert case["findings"][0]["stage"] == "data ids"
        assert case["findings"][0]["cause"]["id"] == "given_cause"


@pytest.mark.parametrize("change", ["half", "half and float", "load"])
def test_a_cast_model_is_recorded_as_it_was_and_other_values_as_they_are(
    tmp_path: Path, change: str
) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    with isoshard.record(tmp_path / "run", model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        trained = model.weight.detach().clone()
        if change == "load":
            model.load_state_dict(zeros)
        else:
            model.half()
        if change == "half and float":
            model.float()

    wanted = {"half": trained, "half and float": trained.half().float(), "load": 0 * trained}
    recorded = _bundle.read_tensors(tmp_path / "run", 0, 0)["param/weight/1"]
    assert recorded.dtype == torch.float32
    assert torch.equal(recorded, wanted[change])


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_a_model_without_graph_breaks_is_recorded(tmp_path: Path, how: str) -> None:
    torch._dynamo.reset()
    model: Any = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "wrapped":
        model = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model.compile(backend="eager", fullgraph=True)
    with isoshard.record(tmp_path / "run", model, optimizer):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert _bundle.read_manifest(tmp_path / "run")["steps"] == [0, 1]
