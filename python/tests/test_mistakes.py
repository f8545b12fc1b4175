# SPDX-License-Identifier: Apache-2.0
"""Three ordinary training loops: right versions conform, and mistakes alarm where they are made.

With all mistakes: python -m mistakes --output-dir DIR.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from live_runs import needs

sys.path.append(str(Path(__file__).parents[1]))
from mistakes import run
from mistakes.cli import agreement
from mistakes.table import LOOPS, MISTAKES, RIGHT
from mistakes.truth import STAGES, Mistake

_FOLDER = Path(run.__file__).parent
_BY_ID = {mistake.id: mistake for mistake in MISTAKES}


def names_in_script(loop: str) -> list[str]:
    """What the script compares `mistake` with."""
    tree = ast.parse((_FOLDER / f"{loop}.py").read_text())
    found = set()
    for node in ast.walk(tree):
        is_mistake = isinstance(node, ast.Compare) and isinstance(node.left, ast.Name)
        if is_mistake and node.left.id == "mistake":
            (name,) = node.comparators
            assert isinstance(name, ast.Constant)
            found.add(name.value)
    return sorted(found)


@pytest.mark.parametrize("loop", LOOPS)
def test_table_has_the_mistakes_of_the_script(loop: str) -> None:
    names = [mistake.name for mistake in MISTAKES if mistake.loop == loop]

    assert names == names_in_script(loop)
    assert len(names) >= 30


def test_first_run_has_all_cases_and_no_paths() -> None:
    path = _FOLDER / "first_run.jsonl"

    records = run.done(path)

    assert set(_BY_ID) <= {case for case, precision in records if precision == "native"}
    assert '": "/' not in path.read_text() and " /" not in path.read_text()


def test_first_wrong_tensor_is_compared_with_kind_name_and_step() -> None:
    case = Mistake("loop", "name", "What.", "gradient", "head.*, norm.*", "why", step=1)
    gradient = STAGES["gradient"][1]

    assert case.is_at(gradient, "head.bias", 1) and case.is_at(gradient, "norm.weight", 1)
    assert not case.is_at(gradient, "head.bias", 0)
    assert not case.is_at(gradient, "embed.weight", 1)
    assert not case.is_at("forward", "head.bias", 1)


def test_loss_is_not_another_forward_record() -> None:
    loss = Mistake("loop", "name", "What.", "loss", "loss", "why")
    forward = Mistake("loop", "name", "What.", "forward", "all", "why")

    assert loss.is_at("forward", "loss", 0) and not loss.is_at("forward", "head", 0)
    assert forward.is_at("forward", "head", 0) and not forward.is_at("forward", "loss", 0)


def test_case_with_a_record_is_not_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = []

    def judge(mistake: Mistake, precision: str, folder: Path) -> dict[str, Any]:
        judged.append(mistake.id)
        return {"id": mistake.id, "precision": precision}

    monkeypatch.setattr(run, "judge", judge)
    path = tmp_path / "records.jsonl"
    first, second, third = (mistake.id for mistake in MISTAKES[:3])
    kept = json.dumps({"id": first, "precision": "native"})
    path.write_text(kept + "\n" + json.dumps({"id": second, "precision": "float64"}) + "\n" + "{")

    records = run.run_all(MISTAKES[:3], "native", tmp_path, path, lambda record: None)

    assert [record["id"] for record in records] == [first, second, third]
    assert judged == [second, third]
    assert len(run.done(path)) == 4


class TestJudged:
    """Runs of the judge."""

    pytestmark = needs("torch")

    @pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.loop)
    def test_right_version_conforms(self, case: Mistake, tmp_path: Path) -> None:
        record = run.judge(case, "native", tmp_path)

        assert (record["exit"], record["status"]) == (0, "conforms"), record["text"]

    @pytest.mark.parametrize(
        "name", ["nanogpt/head_untied_after_wrapping", "trainer/mean_of_own_tokens"]
    )
    def test_mistake_alarms_at_the_right_tensor(self, name: str, tmp_path: Path) -> None:
        case = _BY_ID[name]

        record = run.judge(case, "native", tmp_path)

        assert record["exit"] == 1, record["text"]
        assert agreement(case, record) == "right", record["first"]
