# SPDX-License-Identifier: Apache-2.0
"""What optimizers of Megatron-Core and engines of DeepSpeed hold, read from stand-ins for them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from isoshard import RecordError, _megatron
from isoshard._deepspeed import EngineHooks
from isoshard._megatron import MegatronHooks
from isoshard._recorder import Recorder

RATES = {"exp_avg": 0.5, "exp_avg_sq": 0.25}


class DistributedOptimizer:
    """As Megatron's: one group of parameters in bf16 and fp32, and flat shards of each.

    model_param_group_index_map counts in the order of buffers, the optimizer's group has fp32
    first: whoever looks a state up by that index gets another parameter's.
    """

    def __init__(self, model: nn.Module, is_half: bool = False) -> None:
        first, middle, last = model.parameters()
        self.half, self.full = [first, last], [middle]
        self.buffers = [SimpleNamespace(params=self.half), SimpleNamespace(params=self.full)]
        self.model_float16_groups, self.model_fp32_groups = [self.half], [self.full]
        shards = {p: self._shard_of(p, is_half) for p in model.parameters()}
        self.shard_fp32_from_float16_groups = [[shards[p] for p in self.half]]
        self.shard_fp32_groups = [[shards[p] for p in self.full]]
        self.model_param_group_index_map = {
            p: (0, i) for i, p in enumerate([*self.half, *self.full])
        }
        in_order = [shards[p] for p in [*self.full, *self.half]]
        states = {s: {key: s * rate for key, rate in RATES.items()} for s in in_order}
        group = {"params": in_order, "betas": (0.9, 0.95)}
        self.optimizer = SimpleNamespace(state=states, param_groups=[group])
        self.data_parallel_group = None

    def _shard_of(self, parameter: torch.Tensor, is_half: bool) -> torch.Tensor:
        flat = parameter.detach().float().reshape(-1)
        return flat[: flat.numel() // 2].clone() if is_half else flat.clone()

    def _get_model_param_range_map(self, parameter: torch.Tensor) -> Any:
        shards = [*self.shard_fp32_from_float16_groups[0], *self.shard_fp32_groups[0]]
        shard = shards[self.model_param_group_index_map[parameter][1]]
        return {"param": SimpleNamespace(start=0, end=shard.numel())}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Of three weights, the middle one in fp32; a data-parallel group of one rank."""
    monkeypatch.setattr(_megatron.dist, "all_reduce", lambda tensor, group: None)
    torch.manual_seed(1)
    half = {"bias": False, "dtype": torch.bfloat16}
    return nn.Sequential(
        nn.Linear(4, 3, **half), nn.Linear(3, 3, bias=False), nn.Linear(3, 5, **half)
    )


def hooks_of(model: nn.Module, part: DistributedOptimizer) -> MegatronHooks:
    hooks = MegatronHooks.__new__(MegatronHooks)
    hooks.model, hooks.parts = model, [part]
    return hooks


def test_states_of_mixed_dtypes_in_one_group_are_those_of_their_parameters(
    model: nn.Module,
) -> None:
    part = DistributedOptimizer(model)
    names = {id(p): n for n, p in model.named_parameters()}

    found = {(names[id(p)], key): value for p, key, value in hooks_of(model, part)._states_of(part)}

    expected = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            expected[name, "master"] = parameter.float()
        expected |= {(name, key): parameter.float() * rate for key, rate in RATES.items()}
    assert found.keys() == expected.keys()
    for at, value in expected.items():
        assert torch.equal(found[at], value), at


def test_gradients_of_mixed_dtypes_are_those_of_their_parameters(model: nn.Module) -> None:
    for i, parameter in enumerate(model.parameters()):
        parameter.main_grad = torch.full(parameter.shape, float(i))

    found = dict(hooks_of(model, DistributedOptimizer(model))._gradients())

    assert [(n, float(g.mean())) for n, g in found.items()] == [
        ("0.weight", 0),
        ("1.weight", 1),
        ("2.weight", 2),
    ]


def test_a_state_that_no_rank_has_is_not_recorded_as_zeros(model: nn.Module) -> None:
    part = DistributedOptimizer(model)
    for state in part.optimizer.state.values():
        del state["exp_avg_sq"]

    keys = {key for _, key, _ in hooks_of(model, part)._states_of(part)}

    assert keys == {"master", "exp_avg"}


def test_ranges_that_leave_elements_out_are_an_error(model: nn.Module) -> None:
    part = DistributedOptimizer(model, is_half=True)

    with pytest.raises(RecordError, match=r"all 12 elements of 0\.weight\.master together, got 6"):
        list(hooks_of(model, part)._states_of(part))


class FP32Optimizer:
    """As Megatron's around torch's, where nothing is distributed."""

    def __init__(self, model: nn.Module, clip_grad: float) -> None:
        self.config = SimpleNamespace(clip_grad=clip_grad)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.param_groups = self.optimizer.param_groups

    def prepare_grads(self) -> None: ...
    def step(self) -> None: ...


@pytest.mark.parametrize(("clipping", "said"), [(0.0, None), (0.5, 0.5)])
def test_a_megatron_optimizer_that_clips_to_0_does_not_clip(
    tmp_path: Path, clipping: float, said: float | None
) -> None:
    """As a reference that never clips says nothing: 0 would be another setting."""
    model, recorder = nn.Linear(2, 2), Recorder(tmp_path / "run")

    MegatronHooks(recorder, model, [FP32Optimizer(model, clipping)]).detach()

    assert recorder.training.get("max_grad_norm") == said
    assert recorder.judging.get("max_grad_norm") == said


class Engine(nn.Linear):
    """What hooks ask a DeepSpeedEngine for."""

    def __init__(self, clipping: float) -> None:
        super().__init__(2, 2)
        self.clipping = clipping
        self.optimizer = self.basic_optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def zero_optimization_stage(self) -> int:
        return 0

    def gradient_clipping(self) -> float:
        return self.clipping

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def get_global_grad_norm(self) -> None:
        return None

    def step(self) -> None:
        """Without a gradient."""


@pytest.mark.parametrize(("clipping", "said"), [(0.0, None), (0.5, 0.5)])
def test_an_engine_that_clips_to_0_does_not_clip(
    tmp_path: Path, clipping: float, said: float | None
) -> None:
    recorder = Recorder(tmp_path / "run")

    EngineHooks(recorder, Engine(clipping)).detach()

    assert recorder.training.get("max_grad_norm") == said


def test_an_engine_s_error_is_told_to_the_driver_where_a_script_catches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("grad", "fp32_param", "optimizer_state")
    accessors = SimpleNamespace(**{f"safe_get_full_{name}": lambda p: p.grad for name in names})
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(utils=accessors))
    monkeypatch.setitem(sys.modules, "deepspeed.utils", accessors)
    told: list[Exception] = []
    engine = Engine(0.0)
    hooks = EngineHooks(Recorder(tmp_path / "run"), engine, on_error=told.append)

    with pytest.raises(RecordError, match="backward"):
        engine.step()  # without a forward and backward pass

    assert len(told) == 1
    hooks.detach()
