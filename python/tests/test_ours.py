# SPDX-License-Identifier: Apache-2.0
"""--reference ours: the program isoshard trains the model of the script itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from isoshard import _program

pytestmark = [
    pytest.mark.live,
    pytest.mark.usefixtures("judge_program"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="transformers must be installed"
    ),
]
SCRIPT = """import sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
sizes = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
rest = dict(intermediate_size=64, num_key_value_heads=2, max_position_embeddings=64)
configs = dict(
    qwen2=lambda: Qwen2Config(**sizes, **rest),
    llama=lambda: LlamaConfig(**sizes, **rest),
    gpt2=lambda: GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
    ),
)
model = AutoModelForCausalLM.from_config(configs[sys.argv[1]]()).to(getattr(torch, sys.argv[2]))
ddp = torch.nn.parallel.DistributedDataParallel(model)
OPTIMIZER
ids = torch.randint(96, (48, 12), generator=torch.Generator().manual_seed(5))
for step in range(3):
    b = ids[step * 8 : step * 8 + 8].chunk(world)[rank]
    optimizer.zero_grad()
    ddp(input_ids=b, labels=b).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)"


@pytest.fixture(autouse=True)
def _needs_the_program() -> None:
    try:
        _program.find_trainer()
    except Exception as error:
        pytest.skip(str(error))


def judge(folder: Path, words: str, text: str = SCRIPT, optimizer: str = ADAMW) -> tuple[int, str]:
    script = folder / "train.py"
    script.write_text(text.replace("OPTIMIZER", optimizer))
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [sys.executable, "-m", "isoshard", "judge", "--verbose", "--reference", "ours", "--"]
    command.append(torchrun)
    result = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script), *words.split()],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("words", ["qwen2 float32", "gpt2 float32", "llama bfloat16"])
def test_right_runs_conform(tmp_path: Path, words: str) -> None:
    code, text = judge(tmp_path, words)

    assert code == 0, text
    assert "CONFORMS (within tolerance)  script train (dp 2)" in text


def test_what_is_wrong_in_one_process_too_is_found(tmp_path: Path) -> None:
    fault = "model.model.norm.variance_epsilon = 0.1\n" + ADAMW

    code, text = judge(tmp_path, "qwen2 float32", optimizer=fault)

    assert code == 1, text
    assert "first forward at model.norm (step 0)" in text


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("optimizer = torch.optim.RMSprop(model.parameters())", "SGD or AdamW"),
        (
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
            "momentum to be 0, got 0.9",
        ),
        (
            "p = list(model.parameters())\n"
            "groups = [{'params': p[:3], 'lr': 0.2}, {'params': p[3:]}]\n"
            "optimizer = torch.optim.SGD(groups, lr=0.1)",
            "2 groups with other settings",
        ),
        (ADAMW.replace("lr=", "betas=(0.9, 0.95), lr="), "beta2 to be 0.999, got 0.95"),
    ],
)
def test_what_the_program_cannot_do_is_refused(tmp_path: Path, optimizer: str, words: str) -> None:
    code, text = judge(tmp_path, "qwen2 float32", optimizer=optimizer)

    assert code in (2, 4), text
    assert "--reference ours needs" in text
    assert words in text


def test_a_model_without_a_config_is_refused(tmp_path: Path) -> None:
    start = SCRIPT[: SCRIPT.index("sizes =")]
    text = (
        start + "model = torch.nn.Embedding(96, 4)\nddp = model\n" + SCRIPT.split("model)\n", 1)[1]
    )
    text = text.replace("input_ids=b, labels=b).loss", "b).square().sum()")

    code, said = judge(tmp_path, "", text)

    assert code == 4, said
    assert "got Embedding" in said
