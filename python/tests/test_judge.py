# SPDX-License-Identifier: Apache-2.0
"""Level 0: scripts that know nothing of isoshard, right and with a planted bug."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from report_files import in_text, verdicts_of
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples" / "pytorch"
pytestmark = pytest.mark.usefixtures("judge_program")


def judge(script: Path, ranks: int, *words: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    detail = () if "--quiet" in options else ("--verbose",)
    command = [sys.executable, "-m", "isoshard", "judge", *detail, *options, "--", torchrun]
    command += ["--nproc-per-node", str(ranks), str(script), *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        cwd=script.parent,
        timeout=280,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def planted(name: str, old: str, new: str, folder: Path) -> Path:
    text = (EXAMPLES / name).read_text()
    assert old in text
    script = folder / name
    script.write_text(text.replace(old, new))
    return script


def test_ddp_conforms() -> None:
    code, text = judge(EXAMPLES / "ddp.py", 2)
    assert code == 0, text
    assert "CONFORMS (within tolerance)  script ddp (dp 2)" in text


def test_compiled_ddp_conforms(tmp_path: Path) -> None:
    wrapped = "nn.parallel.DistributedDataParallel(Mlp())"
    compiled = f"torch.compile({wrapped}, backend='aot_eager')"
    code, text = judge(planted("ddp.py", wrapped, compiled, tmp_path), 2)
    assert code == 0, text


def test_fsdp2_with_uneven_rows_and_dealt_samples_conforms() -> None:
    code, text = judge(EXAMPLES / "fsdp2.py", 3)
    assert code == 0, text


def test_fsdp2_with_tensor_parallelism_and_micro_batches_conforms() -> None:
    options = ("--mesh", "dp=2,tp=2")
    code, text = judge(EXAMPLES / "tensor_parallel.py", 4, "--tp", "2", options=options)
    assert code == 0, text


def test_fsdp2_that_is_evaluated_first_conforms(tmp_path: Path) -> None:
    text = (EXAMPLES / "fsdp2.py").read_text()
    blocks = text.replace("for layer in model:", "for layer in model[1:3]:")
    script = tmp_path / "fsdp2.py"
    evaluation = "with torch.no_grad():\n    model(data[0])\nfor batch in data:"
    assert blocks != text and "for batch in data:" in text
    script.write_text(blocks.replace("for batch in data:", evaluation))
    code, text = judge(script, 3)
    assert code == 0, text


def test_an_optimizer_of_replaced_parameters_is_a_finding(tmp_path: Path) -> None:
    making = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
    text = (EXAMPLES / "fsdp2.py").read_text()
    assert making in text
    script = tmp_path / "fsdp2.py"
    script.write_text(text.replace(making, "").replace("mesh = init", f"{making}mesh = init"))
    code, text = judge(script, 3)
    assert code == 1, text
    number = len(list(nn.TransformerEncoderLayer(20, 2, 40).parameters())) * 2 + 3
    assert f"The optimizer holds {number} parameters that Sequential no longer has" in text


def test_an_untouched_command_conforms() -> None:
    code, text = judge(EXAMPLES / "ddp.py", 2, options=("--exec", "--steps", "1"))
    assert code == 0, text


@pytest.mark.parametrize(
    ("old", "new", "first"),
    [
        ("nn.parallel.DistributedDataParallel(Mlp())", "Mlp()", "gradient of embed.weight"),
        (
            "ids.flatten()).backward()",
            "ids.flatten()).mul(world_size).backward()",
            "first loss (step 0)",
        ),
        (
            "    nn.utils.clip",
            "    [p.grad.mul_(world_size) for p in model.parameters()]\n    nn.utils.clip",
            "gradients of all parameters: scale 2 = dp; forward ",
        ),
        ("chunk(world_size)[rank]", "chunk(world_size)[0]", "first data ids input_ids"),
        (
            "torch.manual_seed(0)",
            "nn.parallel.DistributedDataParallel = lambda m: m\ntorch.manual_seed(rank)",
            "first weight as read",
        ),
    ],
    ids=["no all-reduce", "loss times ranks", "sum for average", "same data", "other weights"],
)
def test_a_planted_bug_of_data_parallelism_is_found(
    tmp_path: Path, old: str, new: str, first: str
) -> None:
    code, text = judge(planted("ddp.py", old, new, tmp_path), 2)
    assert code == 1, text
    assert first in text


@pytest.mark.parametrize(
    ("old", "new", "first"),
    [
        (
            "import sys\n",
            "import sys\nfrom torch.distributed.tensor.parallel import style\n",
            "",
        ),
        (
            "dist.init_process_group",
            "RowwiseParallel._prepare_output_fn = staticmethod(\n"
            "    lambda layouts, use_local, module, outputs, mesh: outputs.to_local()\n)\n"
            "dist.init_process_group",
            "first forward at 1.down (step 0)",
        ),
        (
            "    optimizer.step()",
            "    model[3].weight.grad.mul_(mesh['tp'].size())\n    optimizer.step()",
            "first gradient of 3.weight (step 0)",
        ),
    ],
    ids=["right", "no all-reduce", "replicated gradient counted tp times"],
)
def test_a_planted_bug_of_tensor_parallelism_is_found(
    tmp_path: Path, old: str, new: str, first: str
) -> None:
    script = planted("tensor_parallel.py", old, new, tmp_path)
    code, text = judge(script, 4, "--tp", "2", options=("--mesh", "dp=2,tp=2"))
    assert code == (1 if first else 0), text
    assert first in text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    optimizer.step()\n", "", "at least one optimizer step, got none"),
        ("torch.relu(", "nn.Dropout(0.1)(", None),
        (
            "rank, world_size =",
            "assert dist.get_world_size() == 2\nrank, world_size =",
            "must run in one process, too",
        ),
    ],
    ids=["no step", "dropout", "two processes only"],
)
def test_an_error_says_what_to_do(tmp_path: Path, old: str, new: str, words: str | None) -> None:
    if words is None:
        old, new, words = (
            "self.up, self.down =",
            "self.drop = nn.Dropout(0.1)\n        self.up, self.down =",
            "--no-dropout",
        )
    code, text = judge(planted("ddp.py", old, new, tmp_path), 2)
    assert code == 4, text
    assert words in text


def test_a_batch_for_each_process_has_no_verdict(tmp_path: Path) -> None:
    script = planted("ddp.py", "batch.chunk(world_size)[rank]", "batch.roll(rank, 0)[:2]", tmp_path)
    code, text = judge(script, 2)
    assert code == 2, text
    assert "--batch-size 4" in text
    assert in_text(text) == set()


@pytest.mark.parametrize("samples", ["batch", "batch[:2]"])
def test_a_whole_batch_on_every_rank_is_no_data_parallelism(tmp_path: Path, samples: str) -> None:
    script = planted("ddp.py", "batch.chunk(world_size)[rank]", samples, tmp_path)
    folder = tmp_path / "out"
    options = ("--quiet", "--output-dir", str(folder), "--report", str(folder / "report/x.html"))
    code, text = judge(script, 2, options=options)
    assert code == 1, text
    assert in_text(text) | verdicts_of(folder / "report") == {(1, "DIVERGES")}
    (case,) = json.loads((folder / "report" / "report.json").read_text())["cases"]
    assert (case["findings"][0]["name"], case["findings"][0]["ranks"]) == ("input_ids", [0, 1])


def test_a_mesh_of_other_size_is_refused() -> None:
    code, text = judge(EXAMPLES / "ddp.py", 2, options=("--mesh", "dp=3"))
    assert code == 2
    assert "got dp=3 (3) for 2 processes" in text


def test_a_rank_that_records_nothing_is_named(tmp_path: Path) -> None:
    script = planted(
        "ddp.py",
        "    optimizer.step()\n",
        "    if rank == 1:\n        break\n    optimizer.step()\n",
        tmp_path,
    )
    code, text = judge(script, 2)
    assert code == 4, text
    assert "at least one optimizer step, got none on rank 1" in text


def test_a_compiled_model_is_recorded_at_its_borders(tmp_path: Path) -> None:
    new = 'DistributedDataParallel(torch.compile(Mlp(), backend="eager"))'
    script = planted("ddp.py", "DistributedDataParallel(Mlp())", new, tmp_path)
    code, text = judge(script, 2)
    assert code == 0, text
    assert "the model is compiled: no hook inside it is called" in text


@pytest.mark.parametrize(
    ("old", "new", "first"),
    [
        (
            "dist.init_process_group",
            "from torch.distributed.fsdp._fully_shard import _fsdp_collectives as c\n"
            "SUM = dist.ReduceOp.SUM\n"
            "c._get_gradient_divide_factors = lambda *a, **k: (None, None, SUM, SUM)\n"
            "dist.init_process_group",
            "first gradient of 0.weight (step 0)",
        ),
        ("batch[rank::world_size]", "batch[0::world_size]", "first data ids input_ids (step 0)"),
    ],
    ids=["sum for average", "same data"],
)
def test_a_planted_bug_of_fsdp2_is_found(tmp_path: Path, old: str, new: str, first: str) -> None:
    code, text = judge(planted("fsdp2.py", old, new, tmp_path), 3)
    assert code == 1, text
    assert first in text


@pytest.mark.parametrize(
    ("old", "new", "options", "words"),
    [
        (
            "dist.destroy_process_group()",
            "assert world_size == 1",
            ("--run-to-end", "--steps", "1"),
            "exit codes [1, 1] after the steps were recorded",
        ),
        (
            'dist.init_process_group("gloo")',
            'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)',
            (),
            "must have as many processes as its mesh dp=2, got 1",
        ),
    ],
    ids=["crash after the bundle", "every rank alone"],
)
def test_a_run_that_is_none_is_not_judged(
    tmp_path: Path, old: str, new: str, options: tuple[str, ...], words: str
) -> None:
    code, text = judge(planted("ddp.py", old, new, tmp_path), 2, options=options)
    assert code == 4, text
    assert words in text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "    nn.functional.cross_entropy(model(ids)",
            "    nn.functional.cross_entropy(extra(model(ids))",
            "got a call of Linear with the parameter weight beside Mlp",
        ),
        (
            "    optimizer.step()\n",
            "    optimizer.step()\n    torch.optim.SGD(extra.parameters(), lr=0.1).step()\n",
            "got SGD with 2 others ([50, 50], [50])",
        ),
    ],
    ids=["a head outside DDP", "an optimizer of something else"],
)
def test_what_is_trained_beside_the_model_is_refused(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    script = planted("ddp.py", old, new, tmp_path)
    text = script.read_text().replace(
        "optimizer = torch.optim.AdamW(model.parameters()",
        "extra = nn.Linear(50, 50)\n"
        "optimizer = torch.optim.AdamW([*model.parameters(), *extra.parameters()]",
    )
    if "SGD" in new:
        text = text.replace("[*model.parameters(), *extra.parameters()]", "model.parameters()")
    script.write_text(text)
    code, text = judge(script, 2)
    assert code == 4, text
    assert words in text
