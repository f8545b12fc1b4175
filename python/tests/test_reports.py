# SPDX-License-Identifier: Apache-2.0
"""Terminal, exit code and the four formats of a report say the same, whoever found what is wrong.

The judge finds what is wrong with tensors, this package what is wrong with samples.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from record_bundles import EXPECTED, FOLDER
from report_files import in_text, verdicts_of
from test_data import IDS, Labelled, ddp, doubled, unshared
from test_judge import EXAMPLES, judge
from torch import nn

from isoshard import Report, _bundle
from isoshard.cli import main

pytestmark = pytest.mark.usefixtures("judge_program")
BLIND = "The reference is the same script in one process;"
RUNS = [
    (path.name, run)
    for path in sorted(FOLDER.iterdir())
    for run in json.loads((path / EXPECTED).read_text())["runs"]
]


def compared(
    capfd: pytest.CaptureFixture[str], folder: Path, *words: str | Path
) -> tuple[int, set[tuple[int, str]]]:
    """The exit code of `isoshard compare`, and what terminal and files say."""
    capfd.readouterr()
    report = ["--output-dir", str(folder), "--report", str(folder / "page.html")]
    code = main(["compare", *map(str, words), *report])
    return code, in_text(capfd.readouterr().out) | verdicts_of(folder)


@pytest.mark.parametrize(("framework", "run"), RUNS)
def test_of_a_stored_run_they_are_the_same(
    framework: str, run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = json.loads((FOLDER / framework / EXPECTED).read_text())
    words = [word for pair in expected["options"].items() for word in pair]
    bundles = [FOLDER / framework / "reference", FOLDER / framework / run]

    code, said = compared(capfd, tmp_path / "out", *bundles, *words)

    word = expected["runs"][run]["status"].upper()
    assert (code, said) == (0 if run == "right" else 1, {(code, word)})


def recorded(
    check: Callable[..., Report], parallelize: Any, folder: Path, **more: Any
) -> tuple[Path, Path]:
    check(
        lambda: Labelled(nn.Identity()),
        parallelize,
        mesh={"dp": 2},
        batch={"input_ids": IDS, "labels": IDS},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        raises=False,
        keep=folder,
        **more,
    )
    return folder / "reference", folder / "run"


@pytest.mark.parametrize(
    ("parallelize", "more", "word"),
    [
        (ddp, {}, "CONFORMS"),
        (doubled, {}, "DIVERGES"),
        (unshared, {"grad_scale": 1}, "DIVERGES"),  # the judge finds nothing
        (unshared, {}, "DIVERGES"),  # it finds gradients, too
    ],
    ids=["right", "wrong", "whole batch on every rank", "whole batch, wrong scale"],
)
def test_of_samples_they_are_the_same(
    isoshard_check: Callable[..., Report],
    parallelize: Any,
    more: dict[str, Any],
    word: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    bundles = recorded(isoshard_check, parallelize, tmp_path, **more)

    for i, ending in enumerate(("html", "json", "txt", "xml")):
        folder = tmp_path / f"out{i}"
        folder.mkdir()
        words = [f"--{k.replace('_', '-')}={v}" for k, v in more.items()]
        capfd.readouterr()
        code = main(["compare", *map(str, bundles), *words, "--report", f"{folder}/x.{ending}"])
        said = in_text(capfd.readouterr().out) | verdicts_of(folder)
        assert (code, said) == (0 if word == "CONFORMS" else 1, {(code, word)})
    assert verdicts_of(tmp_path / "report") == {(code, word)}


def test_a_bundle_that_cannot_be_read_leaves_no_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The judge alone might find nothing wrong in the files that it reads."""
    for name in ("reference", "right"):
        shutil.copytree(FOLDER / "ddp" / name, tmp_path / name)
    records = _bundle.read_records(tmp_path / "right", 0, 1)
    records["records"][0]["name"] = 3
    _bundle.write_records(tmp_path / "right", 0, 1, records)
    _bundle.reseal(tmp_path / "right")

    words = [str(tmp_path / "reference"), str(tmp_path / "right")]
    code = main(["compare", *words, "--output-dir", str(tmp_path / "out")])

    assert code == 3
    assert not (tmp_path / "out").exists()


def test_reports_say_what_a_reference_of_the_same_script_cannot_see(tmp_path: Path) -> None:
    """A reference that was recorded elsewhere may be of another script."""
    reference = tmp_path / "own" / "reference"
    for name, more in (("own", ()), ("other", ("--reference", str(reference)))):
        folder = tmp_path / name
        page = folder / "page.html"
        options = ("--precision", "native", "--output-dir", str(folder), "--report", str(page))
        code, text = judge(EXAMPLES / "ddp.py", 2, options=(*options, *more))
        assert code == 0, text
        (case,) = json.loads((folder / "report" / "report.json").read_text())["cases"]
        is_blind = name == "own"
        assert any(note.startswith(BLIND) for note in case["notes"]) == is_blind
        assert (BLIND in page.read_text()) == is_blind
