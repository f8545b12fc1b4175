# SPDX-License-Identifier: Apache-2.0
"""`isoshard judge --precision`: two verdicts, the self-check between them, the worse exit code."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from live_runs import EXAMPLES, needs, server

pytestmark = needs("torch")

_SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50))
model = nn.parallel.DistributedDataParallel(model.to(torch.{dtype}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps={eps})
for batch in torch.randint(0, 50, (5, 4, 12), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(size)[rank]
    {before}
    logits = model(ids).float()
    nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    {after}
    optimizer.step()
    optimizer.zero_grad()
"""
_BIAS = "model.module[1].bias.grad"


def judged(
    folder: Path,
    *options: str,
    dtype: str = "bfloat16",
    before: str = "pass",
    after: str = "pass",
    eps: str = "1e-8",
    text: str | None = None,
) -> tuple[int, dict[str, str], str]:
    """Exit code, the word of each precision's line, and all that was printed."""
    script = folder / "train.py"
    whole = text or _SCRIPT.format(dtype=dtype, before=before, after=after, eps=eps)
    script.write_text(whole)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    words = ["judge", *options, "--", torchrun, "--nproc-per-node", "2", str(script)]
    code, said = server().call(words)
    lines = re.findall(r"^(native|float64) +(conforms|diverges|no verdict) +[\d.]+ s", said, re.M)
    return code, dict(lines), said


BOTH = {"native": "conforms", "float64": "conforms"}
ONLY_FLOAT64 = {"native": "conforms", "float64": "diverges"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_0_right_runs_conform_in_both_precisions(tmp_path: Path, dtype: str) -> None:
    code, words, said = judged(tmp_path, "--precision", "both", dtype=dtype)
    assert (code, words) == (0, BOTH), said


def test_0_a_scale_that_roundings_hide_is_found_with_its_cause(tmp_path: Path) -> None:
    after = f"size > 1 and {_BIAS}.mul_(1.004)"
    code, words, said = judged(tmp_path, "--precision", "both", after=after)
    assert (code, words) == (1, ONLY_FLOAT64), said
    assert "scale 1.004" in said


@pytest.mark.parametrize("size", ["1e-6", "1e-10"])
def test_0_small_scales_are_found(tmp_path: Path, size: str) -> None:
    after = f"size > 1 and {_BIAS}.mul_(1 + {size})"
    code, words, said = judged(tmp_path, "--precision", "float64", after=after)
    assert (code, words) == (1, {"float64": "diverges"}), said


def test_4_caches_of_compilers_are_the_verdicts_own(tmp_path: Path) -> None:
    before = (
        "import os; from torch._inductor.runtime.cache_dir_utils import cache_dir; "
        f"open({str(tmp_path / 'folders')!r}, 'a').write("
        "cache_dir() + ' ' + os.environ['TRITON_CACHE_DIR'] + chr(10))"
    )
    keep = tmp_path / "kept"
    code, words, said = judged(
        tmp_path, "--precision", "both", "--output-dir", str(keep), before=before
    )
    assert (code, words) == (0, BOTH), said
    folders = {tuple(line.split()) for line in (tmp_path / "folders").read_text().splitlines()}
    own = [keep / "caches", keep / "float64" / "caches"]
    assert folders == {(str(f / "inductor"), str(f / "triton")) for f in own}
    assert not any(folder.exists() for folder in own)


def test_6_a_program_that_float64_changes_gets_no_float64_verdict(tmp_path: Path) -> None:
    after = f"torch.finfo({_BIAS}.dtype).eps < 1e-9 and {_BIAS}.mul_(1.5)"
    code, words, said = judged(tmp_path, "--precision", "both", after=after)
    assert (code, words) == (0, {"native": "conforms", "float64": "no verdict"}), said
    assert "parameter gradient 1.bias (step 0)" in said
    code, words, said = judged(tmp_path, "--precision", "float64", after=after)
    assert (code, words) == (4, {"float64": "no verdict"}), said


_BEGIN = """    w = model.module[1].weight.data
    nn.init.trunc_normal_(w, std=0.02)
    w.add_(torch.randn(w.shape) * 0.05)
    nn.init.orthogonal_(model.module[3].weight)
"""


def test_6_weights_that_are_computed_from_draws_get_a_verdict(tmp_path: Path) -> None:
    """Their roundings are no change of the program; a change of them is one."""
    begin, rest = _SCRIPT.split("for batch in")
    begin += "with torch.no_grad():\n" + _BEGIN
    right = {"dtype": "float32", "eps": "1e-8", "before": "pass", "after": "pass"}
    text = f"{begin}for batch in{rest}".format(**right)
    code, words, said = judged(tmp_path, "--precision", "float64", text=text)
    assert (code, words) == (0, {"float64": "conforms"}), said
    begin += "    torch.finfo(w.dtype).eps < 1e-9 and w.mul_(1 + 1e-5)\n"
    text = f"{begin}for batch in{rest}".format(**right)
    code, words, said = judged(tmp_path, "--precision", "float64", text=text)
    assert (code, words) == (4, {"float64": "no verdict"}), said
    assert "weights as read 1.weight (step 0)" in said


def test_7_the_exit_code_is_the_worse_one(tmp_path: Path) -> None:
    """All dtypes are equal in float64: the branch that is wrong is taken natively only."""
    after = f"size > 1 and {_BIAS}.dtype != torch.bfloat16 and {_BIAS}.mul_(2)"
    code, words, said = judged(tmp_path, "--precision", "both", dtype="float32", after=after)
    assert (code, words) == (1, {"native": "diverges", "float64": "conforms"}), said
    assert "branches on dtypes" in said


_ATTENTION = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(50, 16), *layers, nn.Linear(16, 50))
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-15)
for batch in torch.randint(0, 50, (5, 4, 12), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(size)[rank]
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_8_gradients_that_cancel_and_a_tiny_eps_conform(tmp_path: Path) -> None:
    """The gradient of a key's bias is zero but for roundings, and eps = 1e-15 steps by its sign."""
    options = ["--precision", "float64", "--steps", "3"]
    code, words, said = judged(tmp_path, *options, text=_ATTENTION)
    assert (code, words) == (0, {"float64": "conforms"}), said


_KEY_BIASES = """
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
config = AutoConfig.for_model({name!r}, vocab_size=50, use_cache=False, **{sizes!r})
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps={eps})
for batch in torch.randint(3, 50, (5, 4, 12), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(size)[rank]
    wrapped(input_ids=ids, labels=ids).loss.backward()
    size > 1 and model.{bias}.grad.mul_({factor})
    optimizer.step()
    optimizer.zero_grad()
"""
_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
_GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_OPT = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_OPT |= {"max_position_embeddings": 16, "word_embed_proj_dim": 16}
_OPT |= dict.fromkeys(("dropout", "attention_dropout", "layerdrop"), 0.0)
_MODELS = {
    "gpt2": (_GPT2, "transformer.h[0].mlp.c_fc.bias"),
    "opt": (_OPT, "model.decoder.layers[0].fc1.bias"),
}


@pytest.mark.parametrize("eps", ["1e-8", "1e-15"])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_8_biases_of_keys_conform_and_others_are_judged(
    tmp_path: Path, name: str, eps: str
) -> None:
    """A softmax ignores them: in right runs their gradients differ by more than their size."""
    pytest.importorskip("transformers")
    sizes, bias = _MODELS[name]
    text = _KEY_BIASES.format(name=name, sizes=sizes, bias=bias, eps=eps, factor="{factor}")
    right, wrong = (text.format(factor=f) for f in ("1", "1 + 1e-9"))
    code, words, said = judged(tmp_path, "--precision", "both", text=right)
    assert (code, words) == (0, BOTH), said
    code, words, said = judged(tmp_path, "--precision", "float64", text=wrong)
    assert (code, words) == (1, {"float64": "diverges"}), said


def test_8_ring_attention_conforms(tmp_path: Path) -> None:
    """Its softmax is made of parts, in another order than that of one process."""
    for name in ("ring_attention.py", "ring_on_cpu.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    text = (tmp_path / "ring_attention.py").read_text()
    options = ["--precision", "both", "--mesh", "cp=2"]
    code, words, said = judged(tmp_path, *options, text=text)
    assert (code, words) == (0, BOTH), said
