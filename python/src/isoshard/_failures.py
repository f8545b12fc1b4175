# SPDX-License-Identifier: Apache-2.0
"""Says why a run of a script left no bundle, and what to do."""

from __future__ import annotations

import re
import signal
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._judge import JudgeOptions

#: A line of faulthandler, which prints the innermost call first.
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parent)
_MOST_LINES = 15


@dataclass(frozen=True)
class Failure:
    """How the processes of one run ended."""

    errors: Path  # what recorders reported, a file a rank
    logs: Path  # what ranks printed, and where they stood
    codes: Sequence[int] | None  # exit codes; None: one still ran when its time was over
    first: int | None  # the rank that failed before others did
    has_bundle: bool
    is_reference: bool
    limit: float  # seconds that it might take


def why_failed(failure: Failure, options: JudgeOptions) -> str:
    """The message of an error."""
    texts = sorted(failure.errors.glob("*.txt"), key=lambda path: path.stat().st_mtime_ns)
    for text in (path.read_text().strip() for path in texts):
        if text:  # a process may end before it has written its own
            return text
    codes = failure.codes
    if codes is None:
        where = "\n".join(where_ranks_stood(failure.logs)) or _tail(failure)
        return (
            f"Each run must end within {round(failure.limit, 1):g} seconds, got one that still ran."
            f" {_more_time(failure, options)} if it needs more. When it was ended:\n{where}"
        )
    tail = f"The last lines of {_whose(failure)} were:\n{_tail(failure)}"
    if failure.has_bundle:
        return (
            f"The command must end well, got exit codes {_in_words(codes)} after the steps were "
            "recorded. Let the script run to its end without an error, or judge it without "
            f"--run-to-end. {tail}"
        )
    if not any(codes):
        return (
            "Every rank must build a torch.optim optimizer, call the model and step, got a "
            "command that ended well without. Does it train with these arguments, and does it "
            f"pass on the environment (PYTHONPATH, ISOSHARD_AUTO)? {tail}"
        )
    if not failure.is_reference:
        return (
            f"The command must end well after {options.steps} recorded steps, got exit codes "
            f"{_in_words(codes)} and no recorded run. {tail}"
        )
    if options.reference_command is not None:
        what = "The reference command must record a run"
    else:
        what = "The script must run in one process, too, to make the reference"
    return (
        f"{what}, got exit code {_in_words(codes[:1])[1:-1]}. If it cannot, give "
        "--reference-command 'COMMAND' (fewer ranks, other arguments) or --reference BUNDLE. "
        f"{tail}"
    )


def _more_time(failure: Failure, options: JudgeOptions) -> str:
    if failure.limit < options.timeout:
        return "Judge with --precision float64, where --timeout is the only limit,"
    return "Give --timeout a larger number"


def _failed_rank(failure: Failure) -> int:
    codes = failure.codes or []
    if failure.first is not None:
        return failure.first
    raised = [i for i, code in enumerate(codes) if code > 0]  # others were ended for it
    return next(iter([*raised, *(i for i, code in enumerate(codes) if code != 0)]), 0)


def _whose(failure: Failure) -> str:
    if failure.codes is None or len(failure.codes) < 2 or not any(failure.codes):
        return "its output"
    return f"rank {_failed_rank(failure)}, the first to fail,"


def _in_words(codes: Sequence[int]) -> str:
    """Exit codes; a process that a signal ended has the signal's name: [1, SIGKILL]."""
    names = {number.value: number.name for number in signal.Signals}
    return f"[{', '.join(names.get(-code, str(code)) for code in codes)}]"


def _tail(failure: Failure) -> str:
    files = sorted(failure.logs.glob("*.log")) if failure.logs.exists() else []
    if not files:
        return "  (no output)"
    file = files[min(_failed_rank(failure), len(files) - 1)]
    lines = file.read_text(errors="replace").splitlines()[-_MOST_LINES:]
    return "\n".join(f"  {line}" for line in lines) or "  (no output)"


def where_ranks_stood(logs: Path) -> list[str]:
    """For each rank that left its stack: the script's line, and what it called there."""
    lines = []
    for path in sorted(logs.glob("rank*.stack")):
        frames = _FRAME.findall(path.read_text(errors="replace"))
        own = [i for i, (file, _, _) in enumerate(frames) if not _is_library(file)]
        if not frames:
            continue
        file, line, function = frames[own[0] if own else 0]
        calls = [name for _, _, name in frames[: own[0] if own else 0] if name != "wrapper"]
        inside = f", in {' < '.join(calls[:3])}" if calls else ""
        rank = int(path.stem.removeprefix("rank"))
        lines.append(f"  rank {rank} was at {Path(file).name}:{line} ({function}){inside}")
    return lines


def _is_library(file: str) -> bool:
    return file.startswith("<") or file.startswith((*_LIBRARIES, _OURS))
