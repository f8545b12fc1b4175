# SPDX-License-Identifier: Apache-2.0
"""The command line: commands of the other program, variables, reports, signals, progress."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isoshard import _environment, _fork, cli
from isoshard._processes import descendants
from isoshard._progress import Progress

ROOT = Path(__file__).parents[2]
TORCHRUN = ["--", str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "t.py"]


def commands_of(folder: Path) -> set[str]:
    """The names that *_command.cc files give the commands of a C++ program."""
    texts = [path.read_text() for path in folder.glob("*_command.cc")]
    return {name for text in texts for name in re.findall(r'return \{\s*"(\w+)",', text)}


def test_commands_of_the_other_program_are_known() -> None:
    others = commands_of(ROOT / "app")
    assert len(others) > 10
    assert set(cli.OF_THE_OTHER) == others - set(cli._COMMANDS)


def test_the_other_program_knows_our_commands() -> None:
    shared = commands_of(ROOT / "harness" / "compare") | commands_of(ROOT / "app")
    text = (ROOT / "harness" / "cli" / "command.cc").read_text()
    (listed,) = re.findall(r"for \(const char\* name : \{([^}]*)\}\)\n\s*isoshard.elsewhere", text)
    assert set(re.findall(r"\w+", listed)) == set(cli._COMMANDS) - shared


@pytest.mark.parametrize(
    ("name", "words"),
    [("verify", "./isoshard verify"), ("test", "./isoshard test"), ("jugde", "mean judge?")],
)
def test_another_command_is_named(
    name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "--preset", "small"]) == 2
    assert words in capsys.readouterr().err


# ---- variables


@pytest.mark.parametrize(
    ("variable", "value", "attribute", "expected"),
    [
        ("ISOSHARD_STEPS", "5", "steps", 5),
        ("ISOSHARD_EXEC", "1", "exec", True),
        ("ISOSHARD_EXEC", "0", "exec", False),
        ("ISOSHARD_ONLY", "param/*", "only", ["param/*"]),
        ("ISOSHARD_AT_STEPS", "0,3", "at_steps", "0,3"),
        ("ISOSHARD_STEPS", "", "steps", 2),
    ],
)
def test_an_option_may_be_a_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, attribute: str, expected: object
) -> None:
    monkeypatch.setenv(variable, value)
    words = ["judge"]
    assert getattr(cli._parser(words).parse_args(words), attribute) == expected


def test_the_command_line_comes_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOSHARD_STEPS", "5")
    monkeypatch.setenv("ISOSHARD_ONLY", "param/*")
    words = ["judge", "--steps=3", "--only", "grad/*"]
    options = cli._parser(words).parse_args(words)
    assert (options.steps, options.only) == (3, ["grad/*"])


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ISOSHARD_STEP", "5", "did you mean ISOSHARD_STEPS?"),
        ("ISOSHARD_STEPS", "many", "got 'many'"),
        ("ISOSHARD_QUIET", "maybe", "must be 1 or 0"),
        ("ISOSHARD_LOSS", "mean", "must be one of avg, sum"),
    ],
)
def test_a_variable_that_cannot_be_taken_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    words: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert cli.main(["judge", *TORCHRUN]) == 2
    assert words in capsys.readouterr().err


def test_a_variable_of_nobody_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ISOSHARD_COFFEE", "1")
    for variable in ("ISOSHARD_JUDGE", "ISOSHARD_RTOL", "ISOSHARD_BUILD_DIR"):
        monkeypatch.setenv(variable, "1")
    cli._parser(["judge"])
    assert re.findall(r"ISOSHARD_\w+", capsys.readouterr().err) == ["ISOSHARD_COFFEE"]


def test_both_programs_know_the_same_variables_that_are_no_options() -> None:
    text = (ROOT / "harness" / "cli" / "options.cc").read_text()
    listed = text.partition("kOtherVariables = {")[2].partition("}")[0]
    assert set(re.findall(r"ISOSHARD_\w+", listed)) == _environment.OTHERS


# ---- command lines


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (TORCHRUN[1:], "must stand after --"),
        (["--reprot", "r.html", *TORCHRUN], "did you mean --report?"),
        (["--reprot=r.html", *TORCHRUN], "did you mean --report?"),
        ([*TORCHRUN[:-1], "missing.py"], "missing.py"),
        (["--mesh", "dp=2", *TORCHRUN[1:], "--steps", "3"], "judge --mesh dp=2 -- "),
    ],
)
def test_a_wrong_command_line_is_refused_before_any_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    hint: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # ranks are forked where no GPU is seen
    monkeypatch.setattr(_fork, "start", lambda *args: pytest.fail("a run was started"))
    assert cli.main(["judge", *words]) == 2
    assert hint in capsys.readouterr().err


# ---- reports


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x.pdf", "must end in one of"),
        ("folder.html", "must be a file"),
        ("file/x.html", "written"),
    ],
)
@pytest.mark.usefixtures("judge_program")
def test_a_report_that_cannot_be_written_is_refused_before_any_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    words: str,
) -> None:
    monkeypatch.setattr(_fork, "start", lambda *args: pytest.fail("a run was started"))
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    assert cli.main(["judge", "--report", str(tmp_path / name), *TORCHRUN]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("judge_program")
def test_no_earlier_report_is_left_where_a_run_fails(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text("of yesterday")
    (tmp_path / "t.py").write_text("raise SystemExit(7)\n")
    words = [*TORCHRUN[:-1], str(tmp_path / "t.py")]
    assert cli.main(["judge", "--report", str(report), *words]) == 4
    assert [p.name for p in tmp_path.glob("report*")] == ["report.html.old"]


@pytest.mark.usefixtures("judge_program")
def test_an_earlier_report_stays_where_an_option_is_refused(tmp_path: Path) -> None:
    report, folder = tmp_path / "report.html", tmp_path / "out"
    report.write_text("of yesterday")
    places = ["--output-dir", str(folder), "--reference", str(folder / "run")]
    assert cli.main(["judge", "--report", str(report), *places, *TORCHRUN]) == 2
    assert report.read_text() == "of yesterday"


# ---- signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("options", [(), ("--exec", "--reference-command", "python t.py")])
@pytest.mark.usefixtures("judge_program")
def test_a_signal_ends_all_runs_with_one_line(
    tmp_path: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    (tmp_path / "t.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('started').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(temporary)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "-m", "isoshard", "judge", "--quiet", *options, *TORCHRUN]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
    )
    started = tmp_path / "started"
    while process.poll() is None and not (started.exists() and started.read_text()):
        time.sleep(0.01)
    below = descendants([process.pid])
    process.send_signal(number)
    error = process.communicate(timeout=120)[1]

    assert process.returncode == 128 + number, error
    assert len(error.splitlines()) == 1 and number.name in error, error
    assert int(started.read_text()) in below
    assert not [pid for pid in below if _runs(pid)]
    assert list(temporary.iterdir()) == []


def _runs(pid: int) -> bool:
    stat = Path("/proc") / str(pid) / "stat"
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


# ---- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ticked(stream: io.StringIO, folder: Path, seconds: int) -> str:
    """What is written in so many seconds, with ten calls in each."""
    clock = [0.0]
    progress = Progress("run", folder, 2, stream=stream, now=lambda: clock[0])
    for tenth in range(10 * seconds + 1):
        clock[0] = tenth / 10
        progress.tick()
    progress.end()
    return stream.getvalue()


def test_a_terminal_has_one_line_that_changes_each_second(tmp_path: Path) -> None:
    (tmp_path / "step0000").mkdir()
    (tmp_path / "step0000" / "rank00000.done").touch()

    text = ticked(Terminal(), tmp_path, 12)

    assert "\n" not in text
    states = text.split("\r\033[K")
    assert states[-1] == ""
    assert states[-2] == "run: 12 s, 1 of 2 steps recorded"
    assert len(states) == 1 + 12 + 1


def test_elsewhere_lines_come_ever_less_often(tmp_path: Path) -> None:
    text = ticked(io.StringIO(), tmp_path, 300)

    assert [line.split()[1] for line in text.splitlines()] == ["30", "60", "120", "240"]
    assert ticked(io.StringIO(), tmp_path, 29) == ""
