# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core: a GPTModel, its data parallelism, its distributed optimizer, planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_runs import Runs, before, fault, needs

pytestmark = needs("megatron")
MESH, RANKS = "dp=2,tp=2", 4

_AFTER_MODEL = "model = distributed"
_AFTER_DDP = "optimizer = get_megatron"

PLAIN = {
    "no all-reduce behind row-parallel layers": before(
        _AFTER_MODEL,
        "from megatron.core.tensor_parallel import layers\n"
        "layers.reduce_from_tensor_model_parallel_region = lambda x, **_: x",
        "first forward at embedding.word_embeddings (step 0): copies differ over tp",
    ),
    "sum for average over dp": before(
        _AFTER_DDP,
        "for group in model.bucket_groups:\n"
        "    for bucket in group.buckets:\n"
        "        bucket.gradient_scaling_factor = 1.0",
        "gradients of all parameters: scale 2 = dp or tp; forward right",
    ),
    "fused qkv rolled by a head": before(
        _AFTER_MODEL,
        "for layer in model.decoder.layers:\n"
        "    weight = layer.self_attention.linear_qkv.weight\n"
        "    weight.data = weight.data.roll(16, 0)",
        "linear_qkv.weight: shift 16 along dim 0 on rank 0",
    ),
    "gate and up interleaved": before(
        _AFTER_MODEL,
        "for layer in model.decoder.layers:\n"
        "    weight = layer.mlp.linear_fc1.weight\n"
        "    weight.data = torch.cat([weight.data[::2], weight.data[1::2]])",
        "first weight as read decoder.layers.0.mlp.linear_fc1.gate.weight",
    ),
    "norms counted tp times": before(
        _AFTER_MODEL,
        "def finalize(*args, **kwargs):\n"
        "    distributed.finalize_model_grads(*args, **kwargs)\n"
        "    for name, parameter in model.named_parameters():\n"
        "        if 'layernorm' in name:\n"
        "            parameter.main_grad.mul_(tp)\n"
        "config.finalize_model_grads_func = finalize",
        "first gradient of decoder.layers.0.input_layernorm.weight",
    ),
    "same data on all ranks": fault(
        ".chunk(dp)[rank]",
        ".chunk(dp)[0]",
        "first data ids input_ids (step 0): differs from the reference on ranks 2, 3",
    ),
    "first micro-batch lost": before(
        "for batch in",
        "whole = forward_step\n"
        "def forward_step(batches, model):\n"
        "    model.zero_grad_buffer()\n"
        "    return whole(batches, model)",
        "first gradient of embedding.word_embeddings.weight",
    ),
    "another switch of Transformer Engine": before(
        _AFTER_MODEL,
        "import os\nos.environ['NVTE_ALLOW_NONDETERMINISTIC_ALGO'] = '1'",
        "the runs have different settings",
        code=2,
    ),
    "a switch on one rank": before(
        _AFTER_MODEL,
        "import os\nos.environ['NVTE_TORCH_COMPILE'] = str(torch.distributed.get_rank())",
        "All ranks must have the same transformer_engine",
        code=4,
    ),
}
CUT = {
    "norms not summed over the sequence": before(
        _AFTER_MODEL,
        "for parameter in model.parameters():\n    parameter.sequence_parallel = False",
        "input_layernorm.weight: rank-local partial over tp",
    ),
    "new weights not gathered": before(
        _AFTER_DDP,
        "model.start_param_sync = lambda *_, **__: None",
        "not updated (bitwise as before)",
    ),
}
FAULTS = [
    ("plain", (MESH, RANKS, "megatron_gpt.py", "2"), PLAIN),
    ("cut", (MESH, RANKS, "megatron_gpt.py", "2 zero sp"), CUT),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("plain"), "megatron_gpt.py", "2")


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("cut"), "megatron_gpt.py", "2 zero sp")


@pytest.mark.parametrize(
    ("words", "mesh", "ranks"),
    [
        ("2", "dp=2,tp=2", 4),
        ("2", "tp=2", 2),
        ("1", "dp=2", 2),
        ("2 zero sp", "dp=2,tp=2", 4),
        ("2 bf16", "dp=2,tp=2", 4),
        ("2 zero sp bf16", "dp=2,tp=2", 4),
        ("4", "tp=4", 4),  # two groups of key and value heads
    ],
)
def test_a_right_run_conforms(tmp_path: Path, words: str, mesh: str, ranks: int) -> None:
    Runs(tmp_path, "megatron_gpt.py", words).conforms(mesh, ranks)


@pytest.mark.parametrize("name", PLAIN)
def test_a_planted_bug_is_found(plain: Runs, name: str) -> None:
    plain.finds(PLAIN[name], MESH, RANKS)


def test_an_optimizer_of_torch_conforms_and_gradients_that_nobody_finalizes_are_found(
    tmp_path: Path,
) -> None:
    """A loop of one's own copies main_grad; Adam's number of steps has no halves of a gated MLP."""
    edits = (
        ("get_megatron_optimizer(adam, [model])", "torch.optim.Adam(model.parameters(), lr=1e-3)"),
        (
            "    optimizer.step()",
            "    for parameter in model.parameters():\n"
            "        parameter.grad = parameter.main_grad\n"
            "    optimizer.step()",
        ),
    )
    runs = Runs(tmp_path, "megatron_gpt.py", "1", edits)
    runs.conforms("dp=2", 2)
    forget = "config.finalize_model_grads_func = None"
    words = "gradients of all parameters: rank-local over dp"
    runs.finds(before(_AFTER_MODEL, forget, words), "dp=2", 2)


@pytest.mark.parametrize("name", CUT)
def test_a_planted_bug_of_sequence_parallelism_or_zero_is_found(cut: Runs, name: str) -> None:
    cut.finds(CUT[name], MESH, RANKS)
