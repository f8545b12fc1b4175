# SPDX-License-Identifier: Apache-2.0
"""PEFT: LoRA adapters over frozen weights, with DDP and FSDP2; planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_runs import Edit, Runs, before, fault, needs

pytestmark = needs("peft", "transformers")

_STEP = "    optimizer.step()"
_TRAINED = "trained ="
DDP = {
    "adapters not reduced": fault(
        "model = DistributedDataParallel(model)",
        "pass",
        "q_proj.lora_B.default.weight: rank-local over dp",
    ),
    "gradients summed for averaged": before(
        _STEP,
        "    [p.grad.mul_(dist.get_world_size()) for p in trained]",
        "q_proj.lora_B.default.weight: scale 2 = dp; the same for 4 of 8",
    ),
    "same data on all ranks": fault(
        "[dist.get_rank()]",
        "[0]",
        "first data ids input_ids (step 0): differs from the reference on rank 1",
    ),
    "adapters scaled twice": fault(
        "lora_alpha=8", "lora_alpha=16", "lora_B.default: scale 2 = dp; forward right"
    ),
    "a frozen weight trained": before(
        _TRAINED,
        "model.module.base_model.model.lm_head.weight.requires_grad_()",
        "first gradient of base_model.model.lm_head.weight (step 0): is not in the reference",
    ),
    "adapters of one rank drawn anew": before(
        _TRAINED,
        "for name, parameter in model.named_parameters():\n"
        "    if 'lora_A' in name and dist.get_rank() == 1:\n"
        "        torch.nn.init.normal_(parameter, std=0.02)",
        "q_proj.lora_A.default.weight: values of dp rank 1",
    ),
    "a frozen weight of one rank is another one": before(
        _TRAINED,
        "if dist.get_rank() == 1:\n"
        "    model.module.base_model.model.lm_head.weight.data.mul_(1.001)",
        "lm_head.weight: scale 1.001 on rank 1",
    ),
}
FSDP2 = {
    "sum for average": before(
        "dist.init_process_group",
        "from torch.distributed.fsdp._fully_shard import _fsdp_collectives as c\n"
        "SUM = dist.ReduceOp.SUM\n"
        "c._get_gradient_divide_factors = lambda *a, **k: (None, None, SUM, SUM)",
        "q_proj.lora_B.default.weight: scale 2 = dp; the same for 4 of 8",
    ),
    "a gradient of an adapter lost": fault(
        "model(input_ids=ids, labels=ids).loss.backward()",
        "model(input_ids=ids, labels=ids).loss.backward()\n    trained[0].grad.zero_()",
        "first gradient of base_model.model.model.layers.0.self_attn.q_proj.lora_A",
    ),
}
FAULTS = [
    ("ddp", ("dp=2", 2, "peft_lora.py", "--wrap ddp"), DDP),
    ("fsdp2", ("dp=2", 2, "peft_lora.py", "--wrap fsdp2"), FSDP2),
]

_ADAPTERS = 'target_modules=["q_proj", "down_proj"]))'
#: Adapters that are not zero are merged into the weights, which are trained then. Biases of keys
#: are not: a softmax ignores them, so that their gradients are roundings, and AdamW takes whole
#: steps in the direction of these. What such a step leaves shows too little for a verdict.
MERGED = (
    _ADAPTERS,
    'target_modules=["q_proj", "down_proj"], init_lora_weights=False))\n'
    "model = model.merge_and_unload().requires_grad_()\n"
    "for layer in model.model.layers:\n"
    "    layer.self_attn.k_proj.bias.requires_grad_(False)",
)
SLOWER = ("lr=1e-2", "lr=1e-3")  # as whole models are trained


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("ddp"), "peft_lora.py", "--wrap ddp")


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("fsdp2"), "peft_lora.py", "--wrap fsdp2")


@pytest.mark.parametrize("words", ["--wrap ddp", "--wrap fsdp2"])
@pytest.mark.parametrize("edits", [(), (MERGED, SLOWER)], ids=["adapters", "merged"])
def test_a_right_run_conforms(tmp_path: Path, words: str, edits: tuple[Edit, ...]) -> None:
    Runs(tmp_path, "peft_lora.py", words, edits).conforms("dp=2", 2)


@pytest.mark.parametrize("name", DDP)
def test_a_planted_bug_is_found(ddp: Runs, name: str) -> None:
    ddp.finds(DDP[name], "dp=2", 2)


@pytest.mark.parametrize("name", FSDP2)
def test_a_planted_bug_of_fsdp2_is_found(fsdp2: Runs, name: str) -> None:
    fsdp2.finds(FSDP2[name], "dp=2", 2)
