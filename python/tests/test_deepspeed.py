# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed: ZeRO stages and AutoTP with accumulated gradients; planted faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from live_runs import Runs, before, fault, needs

pytestmark = needs("deepspeed", "transformers")

_TRAINING = "for batch in"
_STEP = "    engine.step()"
ZERO3 = {
    "gradients summed for averaged": before(
        _TRAINING,
        "engine.optimizer._gradient_averaging_world_size = lambda *_: 1",
        "gradients of all parameters: scale 2 = dp; forward right",
    ),
    "same data on all ranks": fault("[rank]", "[0]", "first data ids input_ids"),
    "first micro-batch lost": before(
        "    engine.backward",
        "    engine.optimizer.grad_partitions_flat_buffer.zero_()",
        "first gradient of model.embed_tokens.weight",
    ),
    "one rank's partitions counted twice": before(
        _STEP,
        "    if rank == 1 and engine.is_gradient_accumulation_boundary():\n"
        "        engine.optimizer.grad_partitions_flat_buffer.mul_(2)",
        "gradient of model.embed_tokens.weight (step 0): differs from the reference on rank 1",
    ),
    "clipped to half the norm": before(
        _TRAINING,
        "engine.optimizer.clip_grad = 0.25",
        "first optimizer state model.embed_tokens.weight.exp_avg",
    ),
    "a partition of one rank moved": before(
        _TRAINING,
        "if rank == 1:\n"
        "    part = model.model.embed_tokens.weight.ds_tensor\n"
        "    part.copy_(part.roll(64))",
        "embed_tokens.weight: shards of dp rank 1 are not slices of the",
    ),
}
AUTOTP = {
    "no all-reduce behind row-parallel layers": before(
        _TRAINING,
        "from deepspeed.module_inject import layers\n"
        "layers.RowParallel.forward = staticmethod(lambda ctx, group, x, is_inference: x.clone())",
        "first forward at model.layers.0.self_attn.o_proj (step 0): copies differ",
    ),
    "input gradients of column-parallel layers not summed": before(
        _TRAINING,
        "from deepspeed.module_inject import layers\n"
        "layers.ColumnParallel.backward = staticmethod(lambda ctx, grad: (None, grad))",
        "first gradient at model.norm (step 0): copies differ over tp",
    ),
    "norms counted tp times": before(
        _STEP,
        "    for name, parameter in model.named_parameters():\n"
        "        if 'norm' in name and engine.is_gradient_accumulation_boundary():\n"
        "            parameter.grad.mul_(tp)",
        "input_layernorm.weight: scale 2 = dp or tp; the same for 5 of 27",
    ),
    "heads of queries swapped": before(
        _TRAINING,
        "for layer in model.model.layers:\n"
        "    weight = layer.self_attn.q_proj.weight\n"
        "    weight.data = weight.data.roll(16, 0)",
        "q_proj.weight: permuted along dim 0 on rank 0",
    ),
    "same data on all ranks": fault("[rank // tp]", "[0]", "first data ids input_ids"),
    "gradients summed for averaged": before(
        _STEP,
        "    if engine.is_gradient_accumulation_boundary():\n"
        "        [p.grad.mul_(dp) for p in model.parameters()]",
        "gradients of all parameters: scale 2 = dp or tp; forward right",
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
    Runs(tmp_path, script, words).conforms(mesh, ranks)


@pytest.mark.parametrize("name", ZERO3)
def test_a_planted_bug_of_zero_is_found(zero3: Runs, name: str) -> None:
    zero3.finds(ZERO3[name], "dp=2", 2)


@pytest.mark.parametrize("name", AUTOTP)
def test_a_planted_bug_of_autotp_is_found(autotp: Runs, name: str) -> None:
    autotp.finds(AUTOTP[name], "dp=2,tp=2", 4)


_ONE_GRADIENT = (
    "engine = deepspeed",
    "norm = model.get_parameter('model.norm.weight')\n"
    "world_size > 1 and norm.register_hook(lambda gradient: gradient * (1 + 1e-7))\n"
    "engine = deepspeed",
)


@pytest.mark.parametrize("zero", ["1", "2", "3"])
def test_zero_conforms_in_float64(tmp_path: Path, zero: str) -> None:
    words = (f"--zero {zero}", (), "--precision", "float64")
    Runs(tmp_path, "deepspeed_zero.py", *words).conforms("dp=2", 2)


def test_a_gradient_that_is_wrong_by_less_than_a_rounding_is_found(tmp_path: Path) -> None:
    words = ("--zero 2", (_ONE_GRADIENT,), "--precision", "both")
    code, text = Runs(tmp_path, "deepspeed_zero.py", *words).right("dp=2", 2)
    assert code == 1, text
    verdicts = re.findall(r"^(native|float64) +(conforms|diverges) +[\d.]+ s", text, re.M)
    assert verdicts == [("native", "conforms"), ("float64", "diverges")], text
    assert "first gradient of model.norm.weight (step 0)" in text
