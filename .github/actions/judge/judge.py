# SPDX-License-Identifier: Apache-2.0
"""Runs every command line of INPUT_COMMANDS and writes a Markdown summary of the verdicts.

Environment: INPUT_COMMANDS has one command line of isoshard on each line; lines that are empty or
begin with # do not count. INPUT_SCRIPTS is a folder that is searched for programs before PATH.
Outputs: `reports`, a folder of reports; `summary`, a Markdown file; `exit-code`.
Exit code: the largest one of the command lines (0 conforms, 1 diverges or vacuous, 2 usage,
3 bad input file, 4 a run failed); 2 without a command line.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import workflow

_MEANINGS = {
    0: "conforms",
    1: "diverges or vacuous",
    2: "wrong usage",
    3: "bad input file",
    4: "a run failed",
}
_STATUSES = ("CONFORMS", "DIVERGES", "VACUOUS", "INCOMPLETE")
#: Commands that write reports.
_REPORTING = ("judge", "compare")
#: GitHub takes 65,536 characters in a comment; the marker and a link are added later.
_MOST_CHARACTERS = 60_000
_MOST_LINES, _MOST_OF_OUTPUT, _MOST_OF_CELL = 60, 12_000, 300


@dataclass
class Result:
    """One command line: its exit code, the text it printed and the names of its reports."""

    line: str
    code: int
    output: str
    reports: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The line with the verdict that decides, or the meaning of the exit code."""
        lines = [line for line in self.output.splitlines() if line.startswith(_STATUSES)]
        deciding = [line for line in lines if line.startswith("CONFORMS") == (self.code == 0)]
        return deciding[0] if deciding else _MEANINGS.get(self.code, "unknown exit code")


def main() -> int:
    """Runs all command lines, and returns the exit code of the step."""
    text = os.environ.get("INPUT_COMMANDS", "")
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        workflow.annotate(
            "error",
            "The input commands must have at least one line, got none. Give it a command line of "
            "isoshard, such as: judge -- torchrun --nproc-per-node 2 train.py",
        )
        return workflow.USAGE
    work = Path(tempfile.mkdtemp(prefix="isoshard-", dir=os.environ.get("RUNNER_TEMP")))
    reports = work / "reports"
    reports.mkdir()
    environment = dict(os.environ)
    if scripts := environment.get("INPUT_SCRIPTS"):
        environment["PATH"] = os.pathsep.join((scripts, environment.get("PATH", os.defpath)))
    results = [
        _run(line, work / f"run-{number:02}", reports / f"{number:02}.html", environment)
        for number, line in enumerate(lines, 1)
    ]
    code = max(result.code for result in results)
    summary = work / "summary.md"
    summary.write_text(summary_of(results), encoding="utf-8")
    workflow.append("GITHUB_STEP_SUMMARY", summary.read_text(encoding="utf-8"))
    for name, value in (("reports", reports), ("summary", summary), ("exit-code", code)):
        workflow.set_output(name, value)
    return code


def _run(line: str, output_dir: Path, report: Path, environment: dict[str, str]) -> Result:
    print(f"::group::isoshard {line}", flush=True)
    try:
        words = shlex.split(line)
    except ValueError as error:
        message = f"A command line must be one that a shell can read, got {error} in: {line}"
        code, output = workflow.USAGE, f"{message}\n"
        print(message)
    else:
        words, copies = _with_outputs(words, output_dir, report)
        before = {path: _changed_at(path) for path in copies}
        code, output = _call(words, environment)
        for path, copy in copies.items():
            if _changed_at(path) not in (None, before[path]):
                shutil.copy(path, copy)
    print("::endgroup::", flush=True)
    names = sorted(path.name for path in report.parent.glob(f"{report.stem}.*"))
    result = Result(line, code, output, names)
    if code != 0:
        workflow.annotate("error", f"exit code {code}: isoshard {line}\n{result.verdict}")
    return result


def _with_outputs(
    words: list[str], output_dir: Path, report: Path
) -> tuple[list[str], dict[Path, Path]]:
    """The command with the options it lacks; and which reports at the user's paths to copy where.

    isoshard judge also writes NAME.float64.html beside NAME.html.
    """
    if words[0] not in _REPORTING:
        return words, {}
    options = words[: words.index("--")] if "--" in words else words
    more: list[str] = []
    copies: dict[Path, Path] = {}
    if _value_of("--output-dir", options) is None:
        more += ["--output-dir", str(output_dir)]
    given = _value_of("--report", options)
    if given is None:
        more += ["--report", str(report)]
    elif given:
        own = Path(given)
        copy = report.with_suffix(own.suffix)
        copies = {
            own.with_stem(own.stem + precision): copy.with_stem(copy.stem + precision)
            for precision in ("", ".float64")
        }
    return [words[0], *more, *words[1:]], copies


def _value_of(option: str, words: list[str]) -> str | None:
    """The last value of an option, as `--option VALUE` or `--option=VALUE`; None if not given."""
    value = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value


def _changed_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def _call(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of isoshard. The output is also printed while it runs."""
    program = shutil.which("isoshard", path=environment.get("PATH"))
    if program is None:
        message = "isoshard must be on PATH, got no such program. Check the input wheel.\n"
        print(message, end="")
        return workflow.FAILED, message
    output: list[bytes] = []
    with subprocess.Popen(
        [program, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
    code = process.returncode
    return (code if code >= 0 else 128 - code), b"".join(output).decode(errors="replace")


def summary_of(results: list[Result]) -> str:
    """A table of all commands, then the ends of their outputs, those that do not conform first."""
    wrong = [result for result in results if result.code != 0]
    right = [result for result in results if result.code == 0]
    head = [
        f"## isoshard: {len(right)} of {len(results)} commands conform\n",
        "| | command | verdict | exit code | report |",
        "|---|---|---|---|---|",
    ]
    rows = [_row(number, result) for number, result in enumerate(results, 1)]
    outputs = [_details(result) for result in (*wrong, *right)]
    budget = _MOST_CHARACTERS - sum(map(len, head)) - 500
    shown_rows = _fitting(rows, budget)
    shown = _fitting(outputs, budget - sum(map(len, shown_rows)))
    text = "\n".join([*head, *shown_rows, "", *shown])
    left_out = len(rows) - len(shown_rows), len(outputs) - len(shown)
    if any(left_out):
        text += f"\nLeft out: {left_out[0]} rows and {left_out[1]} outputs. The log has all.\n"
    return text


def _fitting(parts: list[str], budget: int) -> list[str]:
    """The first parts that fit into so many characters with the newlines between them."""
    shown: list[str] = []
    for part in parts:
        budget -= len(part) + 1
        if budget < 0:
            break
        shown.append(part)
    return shown


def _row(number: int, result: Result) -> str:
    sign = "✅" if result.code == 0 else "❌"
    command, verdict = _literal(result.line), _literal(result.verdict)
    reports = ", ".join(result.reports) or "none"
    return f"| {sign} {number} | <code>{command}</code> | {verdict} | {result.code} | {reports} |"


def _details(result: Result) -> str:
    lines = [line.rstrip() for line in result.output.strip("\n").splitlines()]
    text = "\n".join(lines[-_MOST_LINES:])[-_MOST_OF_OUTPUT:]
    fence = "```"
    while fence in text:
        fence += "`"
    state = " open" if result.code != 0 else ""
    summary = f"<details{state}><summary><code>{_literal(result.line)}</code></summary>"
    return f"{summary}\n\n{fence}text\n{text}\n{fence}\n</details>\n"


def _literal(text: str) -> str:
    """Text that neither Markdown nor HTML reads as more than text."""
    if len(text) > _MOST_OF_CELL:
        text = text[:_MOST_OF_CELL] + " ..."
    return "".join(c if c.isalnum() or c in " .,/=-:" else f"&#{ord(c)};" for c in text)


if __name__ == "__main__":
    sys.exit(main())
