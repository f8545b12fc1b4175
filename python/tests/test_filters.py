# SPDX-License-Identifier: Apache-2.0
"""Filters by name and step: what they leave out is counted, and never passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_judge import EXAMPLES, judge
from test_record import train as train_adam
from test_what_differs import compare, make_reference, records_of, train, verdict_of

from isoshard import UsageError, _bundle
from isoshard._filters import Filter

pytestmark = pytest.mark.usefixtures("judge_program")


def test_names_are_left_out_and_counted(tmp_path: Path) -> None:
    train(tmp_path / "reference")
    train(tmp_path / "run", only=["grad/*", "scalar/loss"])

    kinds = {key.partition("/")[0] for key in records_of(tmp_path / "run")}
    assert kinds == {"grad", "scalar", "data_id"}
    filtered = _bundle.read_manifest(tmp_path / "run")["filtered"]
    assert filtered["only"] == ["grad/*", "scalar/loss"]
    assert filtered["records"] > 0
    code, text = compare(tmp_path / "reference", tmp_path / "run", "--only", "grad/*,scalar/loss")
    assert code == 0, text
    assert "filters left out " in verdict_of(text)
    assert f"{filtered['records']} records that the judged run" in verdict_of(text)


def test_a_run_does_not_excuse_itself(tmp_path: Path) -> None:
    train(tmp_path / "reference")
    train(tmp_path / "run", only=["grad/*", "scalar/loss"])

    code, text = compare(tmp_path / "reference", tmp_path / "run")
    assert code == 1
    assert "was recorded by no rank" in verdict_of(text)
    assert compare(tmp_path / "reference", tmp_path / "run", "--only", "param/*")[0] == 1


def test_what_a_filter_leaves_is_still_judged(tmp_path: Path) -> None:
    train(tmp_path / "reference")
    train(tmp_path / "run", only=["grad/*"], fault=1.5)

    code, text = compare(tmp_path / "reference", tmp_path / "run", "--only", "grad/*")
    assert code == 1
    assert "first gradient of up.weight (step 0)" in verdict_of(text)


def test_steps_are_left_out_but_not_what_the_run_began_with(tmp_path: Path) -> None:
    reference = make_reference(tmp_path, at_steps=[1])
    train(tmp_path / "run", at_steps=[1])
    train(tmp_path / "wrong", at_steps=[1], fault=1.5)

    first = records_of(tmp_path / "run", 0)
    assert {key.partition("/")[0] for key in first} == {"param"}
    assert {key.rpartition("/")[2] for key in first} == {"0"}
    assert "grad/up.weight/0" in records_of(tmp_path / "run", 1)
    code, text = compare(reference, tmp_path / "run", "--at-steps", "1")
    assert code == 0, text
    assert "(at steps 1)" in verdict_of(text)
    code, text = compare(reference, tmp_path / "wrong", "--at-steps", "1")
    assert code == 1
    assert "(step 1)" in verdict_of(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"at_steps": [1]}, "must not come before recorded ones"),
        ({"only": ["param/*"]}, "Gradients must be recorded with what Adam's steps change"),
        ({"only": ["optimizer/*"]}, "Gradients must be recorded"),
        ({"only": "param/*"}, "only must be a list"),
        ({"only": ["weight"]}, "only must be a list"),
        ({"only": ["weights/*"]}, "KIND/NAME with KIND one of"),
        ({"at_steps": [-1]}, "must be numbers from 0 on"),
    ],
)
def test_filters_without_meaning_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        train_adam(tmp_path / "run", **options)


def test_filters_that_adam_allows() -> None:
    judging = {"mask_small_gradients": True}
    for only, steps in ((["grad/*", "param/*"], []), (["activation/*"], []), ([], [0, 1])):
        Filter(only, steps).check(judging)


def test_the_command_line_filters(tmp_path: Path) -> None:
    options = ("--only", "grad/*,param/*,scalar/loss*", "--output-dir", str(tmp_path))
    code, text = judge(EXAMPLES / "ddp.py", 2, options=(*options, "--steps", "1"))

    assert code == 0, text
    assert "filters left out " in verdict_of(text)
    assert not any(key.startswith("activation") for key in records_of(tmp_path / "run"))


@pytest.mark.parametrize(
    "words", [("--at-steps", "x"), ("--at-steps", "0", "--from-step", "1"), ("--from-step", "-1")]
)
def test_steps_that_are_no_numbers_are_refused(words: tuple[str, ...]) -> None:
    code, text = judge(EXAMPLES / "ddp.py", 2, options=words)
    assert code == 2, text
