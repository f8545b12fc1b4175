# SPDX-License-Identifier: Apache-2.0
"""Frameworks: right runs of three steps conform, and their collectives raise no finding."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "pytorch"
pytestmark = [pytest.mark.live, pytest.mark.usefixtures("judge_program")]


def needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed (live-requirements.txt)")


def judged(script: Path, *command: str) -> str:
    words = ["judge", "--steps", "3", "--verbose", "--", *command, str(script)]
    result = subprocess.run(
        [sys.executable, "-m", "isoshard", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=script.parent,
        timeout=500,
        check=False,
    )
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    return text


TORCHRUN = (str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2")


def test_trainer(tmp_path: Path) -> None:
    needs("transformers")
    script = tmp_path / "hf_trainer.py"
    script.write_text(
        (EXAMPLES / "hf_trainer.py").read_text().replace("max_steps=3", "max_steps=4")
    )

    assert "journaled calls of 2 ranks in 3 steps were compared" in judged(script, *TORCHRUN)
