# SPDX-License-Identifier: Apache-2.0
"""Level 3: verdicts in a test, with kept worker processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from isoshard import Divergence, Report, RunError, UsageError
from isoshard._dtypes import Dtypes

pytestmark = pytest.mark.usefixtures("judge_program")
IDS = torch.randint(0, 50, (12, 7), generator=torch.Generator().manual_seed(1))
Check = Callable[..., Report]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        logits = self.head(hidden + self.down(torch.relu(self.up(hidden))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def tensor_parallel(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


def hybrid(model: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])


def nothing(model: nn.Module, mesh: Any) -> None:
    return None


def other_weights(model: nn.Module, mesh: Any) -> nn.Module:
    if mesh.get_rank() == 1:
        with torch.no_grad():
            model.get_parameter("up.bias").add_(1)
    return model


def broken(model: nn.Module, mesh: Any) -> None:
    if mesh.get_rank() == 1:
        raise RuntimeError("out of coffee")


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("parallelize", "mesh"),
    [
        (ddp, {"dp": 3}),
        (tensor_parallel, {"dp": 3, "tp": 2}),
        (hybrid, {"dp_replicate": 2, "dp_shard": 2}),
    ],
)
def test_what_is_right_conforms(
    isoshard_check: Check, parallelize: Any, mesh: dict[str, int], steps: int
) -> None:
    report = isoshard_check(
        Mlp, parallelize, mesh=mesh, batch=IDS, optimizer=adamw, micro_batches=1, steps=steps
    )
    assert report.conforms
    assert report.verdict.startswith("CONFORMS (within tolerance)")


@pytest.mark.parametrize(
    ("parallelize", "words"),
    [(nothing, "rank-local over dp"), (other_weights, "first weight as read up.bias")],
)
def test_what_is_wrong_raises_with_the_report(
    isoshard_check: Check, parallelize: Any, words: str
) -> None:
    with pytest.raises(Divergence, match=words) as caught:
        isoshard_check(Mlp, parallelize, mesh="dp=2", batch=IDS, optimizer=adamw)
    assert "data ids" in caught.value.report


class Fp64(Mlp):
    """In fp64, with a loss of logits in fp32, as transformers' models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        logits = self.head(hidden + self.down(torch.relu(self.up(hidden))))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def slightly_off(model: nn.Module, mesh: Any) -> nn.Module:
    model.down.register_forward_hook(lambda module, args, out: out * (1 + 1e-4), prepend=True)
    return ddp(model, mesh)


def test_a_loss_in_fp32_rounds_what_a_model_in_fp64_computes(
    isoshard_check: Check, tmp_path: Path
) -> None:
    words: dict[str, Any] = {"batch": IDS, "optimizer": adamw, "steps": 2}

    report = isoshard_check(Fp64, ddp, mesh="dp=3", keep=tmp_path, **words)

    assert report.conforms
    manifest = json.loads((tmp_path / "reference" / "manifest.json").read_text())
    assert manifest["settings"]["judging"]["coarsest_dtype"] == "fp32"
    for wrong, first in ((slightly_off, "first forward at down"), (nothing, "over dp")):
        with pytest.raises(Divergence, match=first):
            isoshard_check(Fp64, wrong, mesh="dp=3", **words)


@pytest.mark.parametrize(
    ("recorded", "losses", "said"),
    [
        ({torch.float64}, {torch.float32}, {"coarsest_dtype": "fp32"}),
        ({torch.float64}, {torch.float64}, {}),
        ({torch.float64}, {torch.bfloat16}, {}),
        ({torch.float64, torch.bfloat16}, {torch.float32}, {}),
        ({torch.float32}, {torch.bfloat16}, {}),
        ({torch.bfloat16}, {torch.float32}, {}),
    ],
)
def test_a_loss_makes_no_other_floors_coarser(
    recorded: set[torch.dtype], losses: set[torch.dtype], said: dict[str, str]
) -> None:
    dtypes = Dtypes()
    dtypes.losses = losses
    for dtype in recorded:
        dtypes.see("grad", "weight", dtype)
    assert dtypes.judging() == said


@pytest.mark.parametrize(
    ("computed", "given", "said"),
    [
        (torch.float32, torch.bfloat16, {"coarsest_dtype": "fp32"}),
        (torch.float64, torch.float32, {"coarsest_dtype": "fp64"}),
        (torch.bfloat16, torch.float32, {}),
        (torch.float32, torch.int64, {}),
    ],
)
def test_inputs_make_no_floors_coarser(
    computed: torch.dtype, given: torch.dtype, said: dict[str, str]
) -> None:
    dtypes = Dtypes()
    dtypes.losses = {computed}
    dtypes.see("data_id", "x", given)
    dtypes.see("grad", "weight", computed)
    assert dtypes.judging() == said


def alone() -> nn.Module:
    if dist.is_initialized() and dist.get_world_size() == 1:
        raise RuntimeError("a reference has no process group")
    return Mlp()


def test_a_reference_has_no_process_group_of_an_earlier_case(isoshard_check: Check) -> None:
    words: dict[str, Any] = {"mesh": "dp=2", "batch": IDS, "optimizer": adamw}
    assert isoshard_check(Mlp, ddp, parallel_reference=True, **words).conforms
    assert isoshard_check(alone, ddp, **words).conforms


def test_a_rank_that_fails_is_named_and_workers_recover(isoshard_check: Check) -> None:
    with pytest.raises(RunError, match="(?s)Rank 1 of 2 failed.*out of coffee"):
        isoshard_check(Mlp, broken, mesh="dp=2", batch=IDS, optimizer=adamw)
    assert isoshard_check(Mlp, ddp, mesh="dp=2", batch=IDS, optimizer=adamw).conforms


def test_a_batch_that_does_not_divide_is_refused(isoshard_check: Check) -> None:
    with pytest.raises(UsageError, match="multiple of 10 .* got 12"):
        isoshard_check(Mlp, ddp, mesh="dp=5", batch=IDS, optimizer=adamw, micro_batches=2)


def test_a_function_that_cannot_be_sent_is_refused(
    isoshard_check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="top level of a module"):
        isoshard_check(lambda: Mlp(), ddp, mesh="dp=2", batch=IDS, optimizer=adamw)


def many_groups(model: nn.Module, mesh: Any) -> nn.Module:
    """As frameworks do that make their process groups anew for each model, and keep them."""
    for _ in range(20):
        torch.distributed.new_group()
    return ddp(model, mesh)


def threads(model: nn.Module, mesh: Any) -> nn.Module:
    count = len(list(Path("/proc/self/task").iterdir()))
    assert count <= 64, f"{count} threads"
    return ddp(model, mesh)


def test_ranks_with_many_process_groups_are_started_anew(isoshard_check: Check) -> None:
    for parallelize in (many_groups, threads):
        report = isoshard_check(Mlp, parallelize, mesh="dp=2", batch=IDS, optimizer=adamw)
        assert report.conforms
