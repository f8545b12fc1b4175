# SPDX-License-Identifier: Apache-2.0
"""The generator of the matrix: its cases, what is expected of them, and the command's filters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from matrix import cli, run
from matrix.expect import RULES, expected_of
from matrix.families import NAMES, all_specs, family
from matrix.spec import OUTCOMES, Expected, Spec, mesh

FOUND = Path(__file__).parents[2] / "docs" / "reference" / "found.md"
CASES = list(all_specs())


def test_there_are_enough_cases_and_each_has_its_own_name() -> None:
    ids = [spec.id for _, spec in CASES]

    assert len(ids) >= 500
    assert len(set(ids)) == len(ids)
    assert {name for name, _ in CASES} == set(NAMES)


def test_200_cases_or_more_are_to_conform() -> None:
    counted = [expected_of(spec).outcome for _, spec in CASES]

    assert counted.count("conforms") >= 200


@pytest.mark.parametrize("rule", RULES, ids=[pattern for pattern, _ in RULES])
def test_each_exception_says_why_and_is_about_a_case(rule: tuple[str, Expected]) -> None:
    pattern, expected = rule

    assert expected.outcome in OUTCOMES
    assert expected.why or expected.outcome == "conforms"
    assert any(expected_of(spec) is expected for _, spec in CASES), f"{pattern} fits no case"
    assert expected.words or expected.outcome == "conforms", "a rank that dies must not meet it"
    if expected.outcome == "defect":
        heading = expected.why.partition(":")[0]
        assert f"## {heading}" in FOUND.read_text(), "docs/reference/found.md must have each defect"


@pytest.mark.parametrize("name", NAMES)
def test_each_family_has_what_the_runner_asks_for(name: str) -> None:
    module = family(name)

    assert module.CASES > 0 and module.PRELOAD and isinstance(module.ENVIRONMENT, dict)
    assert callable(module.arguments)


def test_an_outcome_needs_a_known_word_and_a_reason() -> None:
    with pytest.raises(ValueError, match="outcome must be one of"):
        Expected("fine")
    with pytest.raises(ValueError, match="must say why"):
        Expected("defect")


@pytest.mark.parametrize(
    ("words", "is_kept"),
    [
        (["--framework", "zero"], lambda s: s.framework == "zero"),
        (["--architecture", "gpt2"], lambda s: s.architecture == "gpt2"),
        (["--case", "*/bf16/*"], lambda s: s.dtype == "bf16"),
        (["--expect", "defect"], lambda s: expected_of(s).outcome == "defect"),
    ],
)
def test_filters_leave_what_they_say(words: list[str], is_kept: Any) -> None:
    options = cli._parser().parse_args(words)

    assert cli.select(options) == [case for case in CASES if is_kept(case[1])]


def test_a_seed_draws_the_same_cases_again_and_another_seed_others() -> None:
    def drawn(seed: str) -> list[str]:
        options = cli._parser().parse_args(["--limit", "9", "--seed", seed])
        return [spec.id for _, spec in cli.select(options)]

    assert len(drawn("1")) == 9
    assert drawn("1") == drawn("1") != drawn("2")


class Stub(run.Runner):
    """In place of worker processes: each case conforms but those of gpt2."""

    started: list[str] = []

    def run(self, name: str, spec: Spec, keep: Path | None = None) -> dict[str, Any]:
        self.started.append(spec.id)
        outcome = "diverges" if spec.architecture == "gpt2" else "conforms"
        result = {"id": spec.id, "family": name, "outcome": outcome, "verdict": "a verdict"}
        return result | run.judged(spec, result)


def test_what_has_a_result_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "Runner", Stub)
    monkeypatch.setattr(Stub, "started", [])
    words = ["--case", "ddp/plain/*", "--output-dir", str(tmp_path)]

    assert cli.main([*words, "--architecture", "qwen*"]) == 0
    count = len(Stub.started)
    assert cli.main([*words, "--architecture", "qwen*"]) == 0
    assert len(Stub.started) == count > 0
    assert cli.main([*words, "--architecture", "[gq]*"]) == 1
    assert "got diverges: a verdict" in capsys.readouterr().out
    lines = (tmp_path / run.TABLE).read_text().splitlines()
    assert len(lines) == len({json.loads(line)["id"] for line in lines}) == len(Stub.started)


def test_a_line_that_was_cut_off_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command may be ended while it writes a result."""
    monkeypatch.setattr(run, "Runner", Stub)
    monkeypatch.setattr(Stub, "started", [])
    words = ["--case", "ddp/plain/qwen*", "--output-dir", str(tmp_path)]
    assert cli.main(words) == 0
    table, first = tmp_path / run.TABLE, list(Stub.started)
    table.write_text(table.read_text()[:-9])

    assert cli.main(words) == 0

    assert Stub.started == [*first, first[-1]]
    assert list(run.done(tmp_path)) == first


def test_a_result_is_met_only_with_the_words_that_are_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = Spec("ddp", "mlp", mesh(dp=2))
    monkeypatch.setattr(run, "expected_of", lambda spec: Expected("defect", "A: b", "first loss"))

    assert run.judged(spec, {"outcome": "diverges", "verdict": "first loss differs"})["is_met"]
    assert not run.judged(spec, {"outcome": "diverges", "verdict": "first forward"})["is_met"]
    assert not run.judged(spec, {"outcome": "conforms", "verdict": "first loss"})["is_met"]


def test_a_command_without_a_folder_or_a_case_is_refused() -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--framework", "ddp"])
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--framework", "none of these", "--output-dir", "x"])


@pytest.mark.parametrize("precision", ["native", "float64", "both", None])
def test_the_command_judges_in_the_precision_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str | None
) -> None:
    given: dict[str, Any] = {}

    def run_all(cases: Any, directory: Path, **more: Any) -> list[dict[str, Any]]:
        given.update(more)
        return []

    monkeypatch.setattr(cli, "run_all", run_all)
    monkeypatch.delenv("ISOSHARD_PRECISION", raising=False)
    words = ["--output-dir", str(tmp_path), "--limit", "1"]
    assert cli.main([*words, *([] if precision is None else ["--precision", precision])]) == 0
    assert given["precision"] == precision
    assert run.Runner(precision=precision)._precision == (precision or "both")
