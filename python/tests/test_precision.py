# SPDX-License-Identifier: Apache-2.0
"""`isoshard judge --precision`: two verdicts, the self-check between them, the worse exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from live_runs import EXAMPLES, needs, server

from isoshard import UsageError, _environment, cli
from isoshard._precision import Outcome, limit_after, worse
from isoshard._seconds import Seconds

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
    status = "conforms|diverges|vacuous|no verdict"
    lines = re.findall(rf"^(native|float64) +({status}) +[\d.]+ s", said, re.M)
    return code, dict(lines), said


def kept(folder: Path) -> list[dict[str, Any]]:
    """What --output-dir says of each precision."""
    content = json.loads((folder / "precisions.json").read_text())
    outcomes: list[dict[str, Any]] = content["precisions"]
    return outcomes


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


@pytest.mark.parametrize("has_rule", [True, False])
def test_4_the_users_caches_are_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_rule: bool
) -> None:
    """The script writes where Inductor and Triton would, as their own functions say."""
    home = tmp_path / "home"
    (home / "tmp").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(tempfile, "tempdir", str(home / "tmp"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if not has_rule:
        monkeypatch.setattr(_environment, "caches_of", lambda folder: {})
    writes = (
        "import os; from torch._inductor.runtime.cache_dir_utils import cache_dir, "
        "triton_cache_dir; [os.makedirs(d, exist_ok=True) or open(d + '/code.py', 'w').close() "
        "for d in (cache_dir(), os.environ.get('TRITON_CACHE_DIR') "
        "or os.path.expanduser('~/.triton/cache'))]"
    )
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.format(dtype="float32", before=writes, after="pass", eps="1e-8"))
    torchrun = str(Path(sys.executable).parent / "torchrun")
    words = ["judge", "--precision", "both", "--quiet", "--steps", "1", "--"]
    assert cli.main([*words, torchrun, "--nproc-per-node", "2", str(script)]) == 0
    assert bool(list(home.rglob("code.py"))) != has_rule


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


def test_6_a_program_that_proves_nothing_is_vacuous_in_both(tmp_path: Path) -> None:
    after = "[p.grad.zero_() for p in model.parameters()]"
    code, words, said = judged(tmp_path, "--precision", "both", dtype="float32", after=after)
    assert (code, words) == (1, {"native": "vacuous", "float64": "vacuous"}), said


@pytest.mark.parametrize("has_16_bits", [True, False])
def test_7_the_exit_code_is_the_worse_one(tmp_path: Path, has_16_bits: bool) -> None:
    """A wrong branch of float32 alone, which float64 takes only where nothing has 16 bits."""
    before = "torch.ones(1).bfloat16()" if has_16_bits else "pass"
    after = f"size > 1 and {_BIAS}.dtype != torch.bfloat16 and {_BIAS}.mul_(2)"
    options = ["--precision", "both"]
    code, words, said = judged(tmp_path, *options, dtype="float32", before=before, after=after)
    float64 = "conforms" if has_16_bits else "diverges"
    assert (code, words) == (1, {"native": "diverges", "float64": float64}), said
    assert "branches on dtypes" in said


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((0, 1), 1), ((1, 0), 1), ((1, None), 1), ((None,), 4)]
)
def test_7_no_verdict_counts_only_where_it_is_alone(
    codes: tuple[int | None, ...], code: int
) -> None:
    assert worse(Outcome("", c) for c in codes) == code


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


def test_8_a_step_that_noise_makes_natively_gets_a_verdict(tmp_path: Path) -> None:
    """A step follows from the moments beside it, and those of a key's bias are noise natively."""
    text = _ATTENTION.replace("1e-15", "1e-8").replace(".backward()", ".mul(1e-3).backward()")
    biases = "for layer in layers:\n    nn.init.normal_(layer.self_attn.in_proj_bias)\n"
    text = text.replace("model = nn.Sequential", f"{biases}model = nn.Sequential")
    code, words, said = judged(tmp_path, "--precision", "both", "--steps", "2", text=text)
    assert (code, words) == (0, BOTH), said


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
    right, wrong = (
        _KEY_BIASES.format(name=name, sizes=sizes, bias=bias, eps=eps, factor=factor)
        for factor in ("1", "1 + 1e-9")
    )
    code, words, said = judged(tmp_path, "--precision", "both", text=right)
    # With a small eps, native noise moves the key biases by a good part of the learning rate: the
    # forward pass of step 1 shows too little, and nothing is called wrong.
    weak = {"native": "vacuous", "float64": "conforms"}
    assert (code, words) == ((0, BOTH) if eps == "1e-8" else (1, weak)), said
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


_FLOATS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(torch.{dtype})
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
inputs = torch.randn(24, 8)
inputs = ((inputs - inputs.mean(0)) / inputs.std(0) {more}).to(torch.{dtype})
for part in inputs.split(8):
    x = part[rank * 8 // world : (rank + 1) * 8 // world]
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_6_inputs_of_floating_point_are_the_native_ones(tmp_path: Path, dtype: str) -> None:
    """Float64 has them with more bits than the native run."""
    text = _FLOATS.format(dtype=dtype, more="")
    code, words, said = judged(tmp_path, "--precision", "both", text=text)
    assert (code, words) == (0, BOTH), said
    changed = "+ 0.1 * (torch.finfo(torch.float32).eps < 1e-9)"
    text = _FLOATS.format(dtype=dtype, more=changed)
    code, words, said = judged(tmp_path, "--precision", "both", text=text)
    assert (code, words["float64"]) == (0, "no verdict"), said


@pytest.mark.parametrize("factor", ["1", "1.5"])
def test_3_gradients_that_pass_through_numpy_on_ranks_alone_get_no_verdict(
    tmp_path: Path, factor: str
) -> None:
    """numpy rounds them to float32; natively a wrong factor is found."""
    summed = f"""if world > 1:
        for p in model.parameters():
            parts = [None] * world
            dist.all_gather_object(parts, p.grad.numpy().astype("f4"))
            p.grad.copy_(torch.from_numpy(sum(parts) / world * {factor}))
    optimizer.step()"""
    text = _FLOATS.format(dtype="float32", more="").replace("optimizer.step()", summed)
    text = text.replace("nn.parallel.DistributedDataParallel(model)", "model")
    code, words, said = judged(tmp_path, "--precision", "both", text=text)
    native = "conforms" if factor == "1" else "diverges"
    assert (code, words) == (int(factor != "1"), {"native": native, "float64": "no verdict"}), said


_QUANTIZED = "torch.quantize_per_tensor({x}, 0.05, 0, torch.qint8).dequantize()"


def test_9_without_a_double_of_an_operation_the_native_verdict_counts(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    before = f"logged = {_QUANTIZED.format(x='model.module[1].bias.detach().float()')}"
    options = ["--precision", "both", "--output-dir", str(keep)]
    code, words, said = judged(tmp_path, *options, before=before)
    assert (code, words) == (0, {"native": "conforms", "float64": "no verdict"}), said
    assert sum(line.startswith(" ") for line in said.splitlines()) == 0, said  # no note of float64
    assert [o["code"] for o in kept(keep)] == [0, None]
    assert "quantize_per_tensor" in kept(keep)[1]["why"]
    caught = f"try: {before}\n    except RuntimeError: pass"
    code, words, said = judged(tmp_path, "--precision", "both", before=caught)
    assert (code, words) == (0, BOTH), said


_HANGS = "import time; (torch.float32 == torch.float64) and time.sleep(3600)"


def test_10_a_hang_in_float64_is_ended_after_a_limit_of_its_own(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "kept"
    script.write_text(_SCRIPT.format(dtype="float32", before=_HANGS, after="pass", eps="1e-8"))
    torchrun = str(Path(sys.executable).parent / "torchrun")
    words = ["judge", "--precision", "both", "--output-dir", str(folder), "--timeout", "120"]
    words += ["--", torchrun, "--nproc-per-node", "2", str(script)]
    program = (
        "import sys; from isoshard import _precision, cli\n"
        "_precision._MOST_TIMES, _precision._LEAST_SECONDS = 0, 5.0\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", program, *words], env=environment, check=False)
    assert result.returncode == 0
    native, float64 = kept(folder)
    assert [native["status"], float64["status"]] == ["conforms", "no verdict"]
    assert [native["limit"], float64["limit"]] == [120.0, 5.0]


@pytest.mark.parametrize(
    "seconds, limit",
    [({"run": 1.0, "reference": 2.0}, 30.0), ({"run": 20.0, "reference": 2.0}, 200.0)],
)
def test_10_the_limit_of_float64_follows_from_the_native_runs(
    seconds: dict[str, float], limit: float
) -> None:
    native = Seconds()
    native.parts.update(seconds)
    assert limit_after(native) == limit


def test_10_both_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISOSHARD_PRECISION")
    assert _environment.chosen_precision(None) == "both"
    assert cli._parser(["judge"]).parse_args(["judge"]).precision == "both"
    monkeypatch.setenv("ISOSHARD_PRECISION", "float64")
    assert _environment.chosen_precision(None) == "float64"
    assert _environment.chosen_precision("native") == "native"
    with pytest.raises(UsageError):
        _environment.chosen_precision("fp64")


def test_10_each_precision_has_its_report_and_outcome(tmp_path: Path) -> None:
    keep, report = tmp_path / "kept", tmp_path / "r.json"
    places = ["--output-dir", str(keep), "--report", str(report)]
    after = f"size > 1 and {_BIAS}.mul_(1 + 1e-5)"
    code, _, said = judged(tmp_path, "--precision", "both", *places, dtype="float32", after=after)
    native, float64 = kept(keep)
    assert code == max(native["code"], float64["code"]) == 1, said
    files = [keep / "report" / "report.json", report]
    files += [keep / "float64" / "report" / "report.json", tmp_path / "r.float64.json"]
    reports = [json.loads(file.read_text()) for file in files]
    statuses = [r["cases"][0]["status"] for r in reports]
    assert statuses == [native["status"]] * 2 + [float64["status"]] * 2
    names = [r["cases"][0]["case"] for r in reports]
    assert names == ["train"] * 2 + ["train in float64"] * 2
    assert float64["measured"]["relative_error"] > 9e-6
    assert 0 < native["measured"]["share_of_steps"] <= float64["measured"]["share_of_steps"] <= 1

    # one precision alone writes the report that was named, and leaves none of the other one's
    judged(tmp_path, "--precision", "float64", *places, dtype="float32", after=after)
    assert [o["precision"] for o in kept(keep)] == ["float64"]
    names = [json.loads(f.read_text())["cases"][0]["case"] for f in files[1:3]]
    assert names == ["train in float64"] * 2
    assert not files[0].exists() and not files[3].exists()


@pytest.mark.parametrize(
    ("options", "word"), [(["--reference", "kept"], "--reference"), (["--at-steps", "1"], "step 0")]
)
def test_10_what_float64_cannot_do_is_refused_or_noted(
    tmp_path: Path, options: list[str], word: str
) -> None:
    text = _SCRIPT.format(dtype="bfloat16", before="pass", after="pass", eps="1e-8")
    text = text.replace("AdamW(", "SGD(").replace(", eps=1e-8", "")  # Adam's steps need all before
    words = ["--output-dir", str(tmp_path / "kept"), "--precision", "native"]
    if "kept" in options:
        assert judged(tmp_path, *words, text=text)[0] == 0
        options = ["--reference", str(tmp_path / "kept" / "reference")]
    code, lines, said = judged(tmp_path, "--precision", "float64", *options, text=text)
    assert (code, lines) == (2, {}) and word in said
    code, lines, said = judged(tmp_path, "--precision", "both", *options, text=text)
    assert (code, lines) == (0, {"native": "conforms", "float64": "no verdict"}), said
    assert word in said.split("no verdict")[1]


def test_10_exec_judges_in_both(tmp_path: Path) -> None:
    """No rank is forked: float64 begins in each process right after torch was imported."""
    before = "from torch.amp import GradScaler; GradScaler('cpu')"
    after = f"size > 1 and {_BIAS}.mul_(1.004)"
    options = ["--exec", "--precision", "both", "--steps", "1"]
    code, words, said = judged(tmp_path, *options, before=before, after=after)
    assert (code, words) == (1, ONLY_FLOAT64), said
    assert "GradScaler" in said and "scale 1.004" in said


_HOOK = (
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import {hook}; "
    "hasattr(model, 'hooked') or model.register_comm_hook(None, {hook}); model.hooked = True"
)
_REDUCED = "gradients are reduced in bf16; the reference has no reduction"


def test_11_a_compressed_reduction_conforms_and_is_named(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    options = ["--precision", "both", "--output-dir", str(keep)]
    before = _HOOK.format(hook="bf16_compress_hook")
    code, words, said = judged(tmp_path, *options, dtype="float32", before=before)
    assert (code, words) == (1, {"native": "diverges", "float64": "conforms"}), said
    report = json.loads((keep / "report" / "report.json").read_text())["cases"][0]
    assert _REDUCED in report["findings"][0]["diagnosis"]


_FSDP2 = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50))
fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.{dtype}))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.randint(0, 50, (5, 4, 12), generator=torch.Generator().manual_seed(5)):
    ids = batch.chunk(size)[rank]
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_11_a_coarse_reduction_of_fsdp2_conforms_and_is_named(tmp_path: Path, dtype: str) -> None:
    keep = tmp_path / "kept"
    options = ["--precision", "both", "--output-dir", str(keep)]
    code, words, said = judged(tmp_path, *options, text=_FSDP2.format(dtype=dtype))
    is_coarse = dtype == "bfloat16"
    assert words == {"native": "diverges" if is_coarse else "conforms", "float64": "conforms"}, said
    assert code == int(is_coarse)
    report = json.loads((keep / "report" / "report.json").read_text())["cases"][0]
    assert (_REDUCED in json.dumps(report)) == is_coarse
