# SPDX-License-Identifier: Apache-2.0
"""Frameworks: right runs of three steps conform, and their collectives raise no finding."""

from __future__ import annotations

from pathlib import Path

from live_runs import Runs, needs

pytestmark = needs("transformers", "accelerate")


def test_trainer(tmp_path: Path) -> None:
    longer = (("max_steps=3", "max_steps=4"),)
    runs = Runs(tmp_path, "hf_trainer.py", "", longer, "--steps", "3")

    code, text = runs.right("dp=2", 2)

    assert code == 0, text
    assert "journaled calls of 2 ranks in 3 steps were compared" in text
