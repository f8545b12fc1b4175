# SPDX-License-Identifier: Apache-2.0
"""torchtitan's parallelize_llama (0.2.2 is the newest that imports with torch 2.11)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from isoshard import Divergence, Report

pytestmark = [
    pytest.mark.live,
    pytest.mark.usefixtures("judge_program"),
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="no torchtitan"),
]
IDS = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(1))
Check = Callable[..., Report]


def build() -> nn.Module:
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs

    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64}
    model = Transformer(TransformerModelArgs(**sizes, max_seq_len=16, multiple_of=16))
    with torch.no_grad():
        model.init_weights()
    return model


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def titan(model: Any, mesh: Any, checkpointing: str = "none", fault: str = "") -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor.parallel import RowwiseParallel
    from torchtitan.config import JobConfig
    from torchtitan.distributed import parallel_dims
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama

    parallel_dims.device_type = "cpu"
    dp, tp = mesh["dp"].size(), mesh["tp"].size()
    config = JobConfig()
    config.training.seq_len, config.training.mixed_precision_param = 16, "float32"
    config.activation_checkpoint.mode = checkpointing
    config.parallelism.disable_loss_parallel = True
    dims = parallel_dims.ParallelDims(1, dp, 1, tp, 1, 1, 1, dp * tp)

    def own_part(layouts: Any, use_local: bool, module: Any, outputs: Any, mesh: Any) -> Any:
        local = outputs.to_local().chunk(mesh.size(), 1)[mesh.get_local_rank()]
        return local.contiguous()

    name = "_prepare_output_fn" if fault == "no reduce-scatter" else "__doc__"
    replaced = staticmethod(own_part) if fault == "no reduce-scatter" else ""
    with mock.patch.object(RowwiseParallel, name, replaced):
        parallelize_llama(model, dims, config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            # Losses are means here; torchtitan divides them by the tokens of all ranks.
            module.set_gradient_divide_factor(1.0 if fault == "summed" else float(dp))
    if fault == "rotated by another position":
        model.freqs_cis = model.freqs_cis.roll(1, 0)
    if fault == "stale shard" and mesh.get_rank() == 3:
        with torch.no_grad():
            model.layers["1"].feed_forward.w2.weight.to_local().mul_(1.01)
    if fault == "not reduced":
        model.layers["1"].set_requires_gradient_sync(False)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_parallelize_llama_conforms(isoshard_check: Check, checkpointing: str) -> None:
    report = isoshard_check(
        build,
        functools.partial(titan, checkpointing=checkpointing),
        mesh="dp=2,tp=2",
        batch=IDS,
        optimizer=adamw,
        loss=loss_of,
    )
    assert report.verdict.startswith("CONFORMS (within tolerance)")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("no reduce-scatter", r"first forward at tok_embeddings \(step 0\)"),
        ("rotated by another position", "first forward at layers.0.attention.inner_attention"),
        ("summed", "scale 2 = dp"),
        ("stale shard", r"first weight as read layers.1.feed_forward.w2.weight.*on rank 3"),
        ("not reduced", r"first gradient of layers.1"),
    ],
)
def test_a_broken_llama_is_found(isoshard_check: Check, fault: str, words: str) -> None:
    with pytest.raises(Divergence, match=words):
        isoshard_check(
            build,
            functools.partial(titan, fault=fault),
            mesh="dp=2,tp=2",
            batch=IDS,
            optimizer=adamw,
            loss=loss_of,
        )
