# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ZeRO stages and AutoTP with accumulated gradients; planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_runs import Runs, before, fault, needs

pytestmark = needs("deepspeed", "transformers")

_TRAINING = "for batch in"
_STEP = "    engine.step()"
ZERO3 = {
    "gradients summed for averaged": before(
        _TRAINING, "engine.optimizer._gradient_averaging_world_size = lambda *_: 1", "X"
    ),
    "same data on all ranks": fault("[rank]", "[0]", "X"),
    "first micro-batch lost": before(
        "    engine.backward", "    engine.optimizer.grad_partitions_flat_buffer.zero_()", "X"
    ),
    "one rank's partitions not stepped": before(
        _STEP,
        "    if rank == 1 and engine.is_gradient_accumulation_boundary():\n"
        "        engine.basic_optimizer.step = lambda *_, **__: None",
        "X",
    ),
    "norm of one rank's partitions": before(
        _TRAINING,
        "torch.distributed.barrier()\nengine.optimizer.clip_grad = 0.5 / 2",
        "X",
    ),
    "a partition of one rank moved": before(
        _TRAINING,
        "if rank == 1:\n"
        "    part = model.model.embed_tokens.weight.ds_tensor\n"
        "    part.copy_(part.roll(64))",
        "X",
    ),
}
AUTOTP = {
    "no all-reduce behind row-parallel layers": before(
        _TRAINING,
        "from deepspeed.module_inject import layers\n"
        "layers.RowParallel.forward = staticmethod(lambda ctx, group, x, is_inference: x.clone())",
        "X",
    ),
    "input gradients of column-parallel layers not summed": before(
        _TRAINING,
        "from deepspeed.module_inject import layers\n"
        "layers.ColumnParallel.backward = staticmethod(lambda ctx, grad: (None, grad))",
        "X",
    ),
    "norms counted tp times": before(
        _STEP,
        "    for name, parameter in model.named_parameters():\n"
        "        if 'norm' in name and engine.is_gradient_accumulation_boundary():\n"
        "            parameter.grad.mul_(tp)",
        "X",
    ),
    "heads of key and value swapped": before(
        _TRAINING,
        "for layer in model.model.layers:\n"
        "    weight = layer.self_attn.q_proj.weight\n"
        "    weight.data = weight.data.roll(16, 0)",
        "X",
    ),
    "other data on one rank of a group": before(
        "    engine.backward", "    ids = ids.roll(rank % tp, 1)", "X"
    ),
    "gradients summed for averaged": before(
        _STEP,
        "    if engine.is_gradient_accumulation_boundary():\n"
        "        [p.grad.mul_(dp) for p in model.parameters()]",
        "X",
    ),
}
FAULTS = [
    ("zero3", ("dp=2", 2, "deepspeed_zero.py", "--zero 3"), ZERO3),
    ("autotp", ("dp=2,tp=2", 4, "deepspeed_autotp.py", "--tp 2"), AUTOTP),
]


@pytest.fixture(scope="module")
def zero3(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("zero3"), "deepspeed_zero.py", "--zero 3")


@pytest.fixture(scope="module")
def autotp(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("autotp"), "deepspeed_autotp.py", "--tp 2")


@pytest.mark.parametrize(
    ("script", "words", "mesh", "ranks"),
    [
        ("deepspeed_zero.py", "--zero 1", "dp=2", 2),
        ("deepspeed_zero.py", "--zero 2", "dp=2", 2),
        ("deepspeed_zero.py", "--zero 3", "dp=2", 2),
        ("deepspeed_zero.py", "--zero 3", "dp=4", 4),
        ("deepspeed_autotp.py", "--tp 2", "tp=2", 2),
        ("deepspeed_autotp.py", "--tp 2", "dp=2,tp=2", 4),
        ("deepspeed_autotp.py", "--tp 2 --bf16", "dp=2,tp=2", 4),
    ],
)
def test_a_right_run_conforms(
    tmp_path: Path, script: str, words: str, mesh: str, ranks: int
) -> None:
    code, text = Runs(tmp_path, script, words).right(mesh, ranks)
    assert code == 0, text


@pytest.mark.parametrize("name", ZERO3)
def test_a_planted_bug_of_zero_is_found(zero3: Runs, name: str) -> None:
    code, text = zero3.faulty(ZERO3[name], "dp=2", 2)
    assert code == ZERO3[name].code, text
    assert ZERO3[name].words in text, text


@pytest.mark.parametrize("name", AUTOTP)
def test_a_planted_bug_of_autotp_is_found(autotp: Runs, name: str) -> None:
    code, text = autotp.faulty(AUTOTP[name], "dp=2,tp=2", 4)
    assert code == AUTOTP[name].code, text
    assert AUTOTP[name].words in text, text
