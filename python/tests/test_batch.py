# SPDX-License-Identifier: Apache-2.0
"""Scripts that draw a batch for each process: the reference command that they need is named."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_judge import EXAMPLES

from isoshard import UsageError
from isoshard._batch import refuse_own_batches, with_batch_of
from isoshard._data import CauseId, Finding

OWN = Finding(0, "ids", "what", CauseId("no_data_sampler"), [0, 1], samples=4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("t.py --batch-size 4", "t.py --batch-size 8"),
        ("t.py --batch_size=4 --lr 1", "t.py --batch_size=8 --lr 1"),
        ("t.py --micro-batch-size 4", "t.py --micro-batch-size 8"),
        ("t.py --micro-batch-size 2", None),  # 2 is not what a process draws
        ("t.py --eval-batch 9 --batch 4", "t.py --eval-batch 9 --batch 8"),
        ("t.py --bs 4 --batch 4", "t.py --bs 4 --batch 8"),
        ("-m own.t -b 4", "-m own.t -b 8"),
        ("t.py", None),
        ("t.py --batch-size four", None),
    ],
)
@pytest.mark.parametrize(
    "launcher", ["torchrun --nproc-per-node 2", "accelerate launch --multi_gpu --num_processes=2"]
)
def test_the_option_and_the_number_are_found(
    launcher: str, arguments: str, words: str | None
) -> None:
    found = with_batch_of(shlex.split(f"{launcher} {arguments}"), 4, 2)
    assert found == (None if words is None else ["python", *shlex.split(words)])


def test_launchers_that_are_not_known_have_a_script_too() -> None:
    found = with_batch_of(["mpirun", "-np", "2", "python", "t.py", "--batch-size", "4"], 4, 2)
    assert found == ["python", "t.py", "--batch-size", "8"]
    assert with_batch_of(["bash", "run.sh", "--batch-size", "4"], 4, 2) is None


def test_an_option_that_the_script_defines_is_found(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(
        'parser.add_argument("--lr")\nparser.add_argument("--batch-size", default=4)\n'
    )

    words = with_batch_of(["torchrun", "--nproc-per-node", "2", str(script), "--lr", "1"], 4, 3)

    assert words == ["python", str(script), "--lr", "1", "--batch-size", "12"]


def test_only_batches_of_their_own_are_refused() -> None:
    whole = Finding(0, "ids", "what", CauseId("no_data_sampler"), [0, 1])
    refuse_own_batches([whole], ["torchrun", "t.py"], 2, False)
    for has_reference, words in ((False, "--reference-command"), (True, "batch size of 8")):
        with pytest.raises(UsageError, match=words):
            refuse_own_batches([whole, OWN], ["torchrun", "t.py"], 2, has_reference)


SAMPLES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
size = parser.parse_args().batch_size
data = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(5))
for step in range(4):
    begin = (step * world_size + rank) * size
    ids = data[begin : begin + size]
"""


def judge(script: Path, *options: str) -> tuple[int, str]:
    folder = Path(sys.executable).parent
    command = [sys.executable, "-m", "isoshard", "judge", *options, "--"]
    command += [str(folder / "torchrun"), "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("more", [(), ("--exec",)])
@pytest.mark.usefixtures("judge_program")
def test_the_printed_reference_command_makes_the_run_conform(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    """The script calls init_process_group, and nobody but us tells it that it is alone."""
    text = (EXAMPLES / "ddp.py").read_text()
    head, _, tail = text.partition("for batch in ")
    script = tmp_path / "train.py"
    script.write_text(head + SAMPLES + tail.partition("\n")[2].partition("\n")[2])
    report = tmp_path / "report.json"

    code, said = judge(script, "--report", str(report), *more)

    assert code == 2, said
    assert "DIVERGES" not in said and "CONFORMS" not in said
    assert not report.exists()
    printed = re.search(r"--reference-command ('.*')", said)
    assert printed is not None, said
    (command,) = shlex.split(printed.group(1))
    assert shlex.split(command)[1:] == [str(script), "--batch-size", "8"]
    code, said = judge(script, "--reference-command", command, "--steps", "1", *more)
    assert code == 0, said
