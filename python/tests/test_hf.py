# SPDX-License-Identifier: Apache-2.0
"""Hugging Face: tp_plan of several architectures, Trainer, accelerate; planted faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_runs import DDP_SUMS, Edit, Runs, before, fault, needs

pytestmark = needs("transformers", "accelerate")

_PLAN = "with tempfile"
_STEP = "    optimizer.step()"
TP_PLAN = {
    "no all-reduce behind row-parallel layers": before(
        _PLAN,
        "from transformers.distributed.tensor_parallel import RowwiseParallel\n"
        "RowwiseParallel.transform_output_post_forward = (\n"
        "    lambda self, module, output, mesh: output.to_local()\n"
        ")",
        "first forward at model.layers.0.self_attn.o_proj (step 0): copies differ over tp",
    ),
    "input gradients averaged over tp": before(
        "model.train()",
        "for layer in model.model.layers:\n"
        "    layer.mlp.register_full_backward_hook(lambda m, into, out: (into[0] / 2,))",
        "first gradient at model.layers.1.post_attention_layernorm",
    ),
    "norms counted tp times": before(
        _STEP,
        "    for name, parameter in model.named_parameters():\n"
        "        if 'norm' in name:\n"
        "            parameter.grad.mul_(2)",
        "input_layernorm.weight: scale 2 = tp; the same for 5 of 27",
    ),
    "heads of key and value swapped": before(
        "model.train()",
        "for layer in model.model.layers:\n"
        "    weight = layer.self_attn.k_proj.weight\n"
        "    local = weight.to_local() if hasattr(weight, 'to_local') else weight\n"
        "    local.data.copy_(local.data.roll(8, 0))",
        "k_proj.weight: permuted along dim 0 on rank 0",
    ),
    "other data on one rank": before(
        "    model(input_ids",
        "    ids = ids.roll(torch.distributed.get_rank(), 1)",
        "first data ids input_ids (step 0): copies differ over tp",
    ),
}
TRAINER = {
    "gradients summed for averaged": before(
        "Trainer(model",
        DDP_SUMS,
        "gradients of all parameters: scale 2 = dp",
    ),
    "first micro-batch lost": before(
        "Trainer(model",
        "step = Trainer.training_step\n"
        "def forgetful(self, model, *args, **kwargs):\n"
        "    model.zero_grad()\n"
        "    return step(self, model, *args, **kwargs)\n"
        "Trainer.training_step = forgetful",
        "forward passes whose gradients no step reads",
    ),
    "same data on all ranks": before(
        "Trainer(model",
        "import accelerate.data_loader\n"
        "shard = accelerate.data_loader.BatchSamplerShard\n"
        "init = shard.__init__\n"
        "shard.__init__ = lambda self, *args, **kwargs: (\n"
        "    init(self, *args, **kwargs), setattr(self, 'process_index', 0))[0]",
        "first data ids input_ids",
    ),
}
ACCELERATE = {
    "first micro-batch lost": before(
        "        loss = model",
        "        model.zero_grad()",
        "forward passes whose gradients no step reads",
    ),
    "no all-reduce": before(
        "for ids in loader",
        "model = model.module",
        "gradients of all parameters: rank-local over dp",
    ),
    "every micro-batch counted whole": fault(
        "accelerator.backward(loss)",
        "(loss * 1).backward()",
        "first loss (step 0): differs from the reference",
    ),
    "another norm to clip by": fault(
        "accelerator.clip_grad_norm_(model.parameters(), 1.0)",
        "accelerator.clip_grad_norm_(model.parameters(), 1.0 / accelerator.num_processes)",
        "the runs have different settings",
        code=2,
    ),
}
MODELS = [
    *("qwen2", "qwen3", "llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text"),
    *("phi3", "granite", "olmo2", "cohere", "starcoder2", "glm"),
]
#: Padded samples, so that micro-batches and ranks have different numbers of tokens.
UNEVEN = (
    'return {"input_ids": ids, "labels": ids}',
    'return {"input_ids": ids, "labels": torch.where(torch.arange(32) < 8 + i % 20, ids, -100)}',
)
ACCUMULATED = ("    max_steps=3", "    gradient_accumulation_steps=2,\n    max_steps=3")
HALF = ("batch_size=8", "batch_size=4")
FAULTS = [
    ("tp_plan", ("tp=2", 2, "hf_tp_plan.py", "--model qwen2"), TP_PLAN),
    ("trainer", ("dp=2", 2, "hf_trainer.py", "", (ACCUMULATED, HALF, UNEVEN)), TRAINER),
    ("accelerate", ("dp=2", 2, "accelerate_loop.py", ""), ACCELERATE),
]


@pytest.fixture(scope="module")
def tp_plan(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("tp_plan"), "hf_tp_plan.py", "--model qwen2")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    edits = (ACCUMULATED, HALF, UNEVEN)
    return Runs(tmp_path_factory.mktemp("trainer"), "hf_trainer.py", "", edits)


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("accelerate"), "accelerate_loop.py", "")


@pytest.mark.parametrize("model", MODELS)
def test_the_plan_of_an_architecture_conforms(tmp_path: Path, model: str) -> None:
    Runs(tmp_path, "hf_tp_plan.py", f"--model {model}").conforms("tp=2", 2)


@pytest.mark.parametrize(
    ("script", "edits"),
    [
        ("hf_trainer.py", ()),
        ("hf_trainer.py", (ACCUMULATED, HALF)),
        ("hf_trainer.py", (ACCUMULATED, HALF, UNEVEN)),
        ("accelerate_loop.py", ()),
    ],
    ids=["trainer", "accumulated", "accumulated with uneven tokens", "accelerate"],
)
def test_a_right_run_conforms(tmp_path: Path, script: str, edits: tuple[Edit, ...]) -> None:
    Runs(tmp_path, script, "", edits).conforms("dp=2", 2)


@pytest.mark.parametrize("name", TP_PLAN)
def test_a_planted_bug_of_tensor_parallelism_is_found(tp_plan: Runs, name: str) -> None:
    tp_plan.finds(TP_PLAN[name], "tp=2", 2)


@pytest.mark.parametrize("name", TRAINER)
def test_a_planted_bug_of_trainer_is_found(trainer: Runs, name: str) -> None:
    trainer.finds(TRAINER[name], "dp=2", 2)


@pytest.mark.parametrize("name", ACCELERATE)
def test_a_planted_bug_of_accelerate_is_found(accelerated: Runs, name: str) -> None:
    accelerated.finds(ACCELERATE[name], "dp=2", 2)
