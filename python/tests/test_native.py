# SPDX-License-Identifier: Apache-2.0
"""Level 0: scripts with what PyTorch itself offers, right and with a planted bug."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_judge import EXAMPLES, judge, planted

pytestmark = [pytest.mark.live, pytest.mark.usefixtures("judge_program")]
PIPELINE = ("--mesh", "dp=2,pp=2")


@pytest.mark.parametrize(("mesh", "ranks"), [("pp=2", 2), ("dp=2,pp=2", 4)])
def test_a_pipeline_conforms(mesh: str, ranks: int) -> None:
    code, text = judge(EXAMPLES / "pipeline.py", ranks, options=("--mesh", mesh))
    assert code == 0, text
    assert "data ids              1 tensors" in text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'chunk(dp)[mesh["dp"].get_local_rank()]',
            "chunk(dp)[0]",
            "first data ids input_ids (step 0)",
        ),
        (
            "    optimizer.step()",
            "    nn.utils.clip_grad_norm_(part.parameters(), 0.1)\n    optimizer.step()",
            "first grad_norm (step 0)",
        ),
        (
            "target=ids)",
            "target=ids.flip(1) if pp == 2 else ids)",
            "first loss (step 0)",
        ),
        (
            "part = nn.parallel",
            "part[0] = nn.Linear(16, 16) if rank else part[0]\npart = nn.parallel",
            "first weight as read",
        ),
    ],
    ids=["same data", "norm of one stage", "other targets", "other weights"],
)
def test_a_planted_bug_of_a_pipeline_is_found(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    code, text = judge(planted("pipeline.py", old, new, tmp_path), 4, options=PIPELINE)
    assert code == 1, text
    assert words in text


def test_a_stage_that_never_steps_is_named(tmp_path: Path) -> None:
    new = "    if stage.is_first:\n        optimizer.step()"
    code, text = judge(planted("pipeline.py", "    optimizer.step()", new, tmp_path), 4)
    assert code == 4, text


def test_a_pipeline_needs_its_axis_in_the_mesh() -> None:
    code, text = judge(EXAMPLES / "pipeline.py", 2)
    assert code == 4, text
    assert "The axis pp of the mesh must hold the ranks of a pipeline, got dp=2" in text
