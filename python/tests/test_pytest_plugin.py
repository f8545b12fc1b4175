# SPDX-License-Identifier: Apache-2.0
"""The fixture isoshard_check in a pytest session of its own: kept workers, and kept reports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report_files import verdicts_of

pytestmark = pytest.mark.usefixtures("judge_program")
CASES = """\
import os
import pytest
import torch
from isoshard import Divergence
from torch import nn

BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
WORDS = {"mesh": {"dp": 2}, "batch": BATCH}


def build():
    return nn.Linear(3, 2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def loss(output, batch):
    return output.square().mean()


def ddp(model, mesh):
    with open(f"{os.environ['NOTES']}/{mesh.get_rank()}", "a") as notes:
        notes.write(f"{os.getpid()}\\n")
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def unreduced(model, mesh):
    return ddp(model, mesh) if "RIGHT" in os.environ else None


def failing(model, mesh):
    raise RuntimeError("out of coffee")


@pytest.fixture
def check(isoshard_check):
    return lambda parallelize, **more: isoshard_check(
        build, parallelize, optimizer=sgd, loss=loss, **WORDS, **more
    )


@pytest.mark.parametrize("number", [1, 2, 3])
def test_right(check, number):
    check(ddp)


@pytest.mark.parametrize("name", ["a/b", "a b"])
def test_wrong(isoshard_check, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    isoshard_check(build, unreduced, optimizer=sgd, loss=loss, **WORDS)


def test_expected(check):
    with pytest.raises(Divergence):
        check(unreduced)


def test_late(check):
    report = check(unreduced, raises=False)
    check(ddp)
    assert report.conforms


def test_usage(isoshard_check):
    isoshard_check(build, ddp, optimizer=sgd, loss=loss, micro_batches=3, **WORDS)


def test_broken(isoshard_check):
    isoshard_check(build, failing, optimizer=sgd, loss=loss, **WORDS)
"""
FAILING = {"test_wrong[a/b]", "test_wrong[a b]", "test_late", "test_usage", "test_broken"}


@dataclass
class Session:
    """What a session of pytest did: the text of each failure by test, and where reports are."""

    failures: dict[str, str]
    reports: Path
    pids: list[list[str]]

    def folders(self) -> set[str]:
        return {path.name for path in self.reports.iterdir()} if self.reports.exists() else set()


def run(folder: Path, *options: str, **environment: str) -> Session:
    (folder / "test_cases.py").write_text(CASES)
    notes = folder / "notes"
    notes.mkdir(exist_ok=True)
    more = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "NOTES": str(notes), **environment}
    words = ["-q", "-p", "isoshard.pytest_plugin", f"--rootdir={folder}", "--junitxml=out.xml"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "test_cases.py", *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **more},
    )
    assert result.returncode in (0, 1), result.stdout + result.stderr
    failures = {
        case.get("name", ""): failure.text or ""
        for case in ElementTree.parse(folder / "out.xml").iter("testcase")
        for failure in case.iter("failure")
    }
    pids = [path.read_text().split() for path in sorted(notes.iterdir())]
    return Session(failures, folder / "reports", pids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture(scope="module")
def session(folder: Path, judge_program: str) -> Session:
    return run(folder, "--isoshard-reports=reports")


def test_the_session_keeps_its_workers(session: Session) -> None:
    """A rank that fails ends the ranks; that is the last test."""
    assert set(session.failures) == FAILING
    assert [len(pids) for pids in session.pids] == [4, 4]
    assert [len(set(pids)) for pids in session.pids] == [1, 1]


def test_a_failing_test_keeps_its_reports(session: Session) -> None:
    names = sorted(session.folders())
    assert [re.sub(r"-[0-9a-f]{8}$", "", name) for name in names] == [
        "test_cases.py-test_late",
        "test_cases.py-test_wrong-a-b",
        "test_cases.py-test_wrong-a-b",
    ]
    for name in names:
        folder = session.reports / name
        assert {path.name for path in folder.iterdir()} == {"report.html", "report.json"}
        assert verdicts_of(folder) == {(1, "DIVERGES")}


def test_a_failure_is_the_verdict_and_the_folder(session: Session) -> None:
    for name in ("test_wrong[a/b]", "test_wrong[a b]"):
        text = session.failures[name]
        (folder,) = re.findall(r"Reports +(\S+)", text)
        assert Path(folder).parent == session.reports and Path(folder).name in session.folders()
        assert f"test_cases.py::{name}" in text  # the command that repeats it
        lines = [line for line in text.splitlines() if line.startswith("E ")]
        assert 4 <= len(lines) <= 9, text


@pytest.mark.parametrize("name", sorted(FAILING))
def test_a_failure_shows_no_code_of_the_package(session: Session, name: str) -> None:
    """Each shown frame is a line `FILE:LINE: ...`."""
    frames = re.findall(r"^(\S+\.py):\d+: ", session.failures[name], re.MULTILINE)

    assert [Path(frame).name for frame in frames] == ["test_cases.py"]


def test_a_rank_that_fails_is_shown_with_its_own_code(session: Session) -> None:
    assert "in failing" in session.failures["test_broken"]
    assert "out of coffee" in session.failures["test_broken"]


def test_a_test_that_passes_again_removes_its_reports(session: Session, folder: Path) -> None:
    before = session.folders()

    again = run(folder, "--isoshard-reports=reports", "-k", "wrong", RIGHT="1")

    assert again.failures == {}
    assert again.folders() == {name for name in before if "test_late" in name}


def test_without_the_option_reports_are_in_the_temporary_folder(tmp_path: Path) -> None:
    base = tmp_path / "base"

    session = run(tmp_path, f"--basetemp={base}", "-k", "a/b", ISOSHARD_PRECISION="both")

    (text,) = session.failures.values()
    (name,) = re.findall(r"Reports +(\S+)", text)
    assert Path(name).parent.parent == base
    endings = ("html", "json", "float64.html", "float64.json")
    assert {path.name for path in Path(name).iterdir()} == {f"report.{e}" for e in endings}
    assert session.folders() == set()
