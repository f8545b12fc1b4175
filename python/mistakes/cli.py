# SPDX-License-Identifier: Apache-2.0
"""The command line of the mistakes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .run import done, run_all
from .table import LOOPS, MISTAKES, RIGHT
from .truth import Mistake

_FIRST_RUN = Path(__file__).with_name("first_run.jsonl")
_EPILOG = """\
Each case is a training loop with one mistake, which isoshard judge runs in one process and on two
ranks. A case that has a record is not run again. DIR/table.md has a line for each case.

Example:
  cd python && PYTHONPATH=src python -m mistakes --output-dir runs/mistakes --loop nanogpt
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mistakes",
        description="Judges training loops with the mistakes of their users.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output-dir", metavar="DIR", required=True, help="where runs are kept")
    parser.add_argument("--loop", choices=LOOPS, help="only this loop")
    parser.add_argument("--only", metavar="GLOB", default="*", help="only mistakes of such a name")
    parser.add_argument(
        "--precision", choices=("native", "float64"), default="native", help="default: native"
    )
    parser.add_argument("--record", metavar="FILE", help="records (default: DIR/records.jsonl)")
    return parser


def select(loop: str | None, pattern: str) -> list[Mistake]:
    """The right versions and mistakes that the filters leave, loop by loop."""
    cases = [case for name in LOOPS for case in (*RIGHT, *MISTAKES) if case.loop == name]
    return [case for case in cases if loop in (None, case.loop) and fnmatchcase(case.name, pattern)]


def place(record: dict[str, Any]) -> str:
    """The first wrong tensor in words: stage, name, step."""
    first = record["first"]
    return f"{first['stage']} {first['name']} (step {first['step']})" if first else "-"


def agreement(case: Mistake, record: dict[str, Any]) -> str:
    """How the verdict's status and first tensor compare with the truth."""
    if record["status"] != case.expects:
        return "no alarm" if record["status"] == "conforms" else record["status"]
    if case.expects == "conforms":
        return "right"
    first = record["first"]
    if first is None:
        return "no tensor"
    at = case.is_at(first["stage"], first["name"], first["step"])
    return "right" if at else "another tensor"


def line(case: Mistake, record: dict[str, Any]) -> str:
    """One case in one line."""
    words = [case.id, record["precision"], f"exit {record['exit']}", record["status"]]
    cause = record.get("cause")
    words += [place(record), cause["id"] if cause else "no cause"]
    return " | ".join([*words, agreement(case, record), record["text"]])


def of_first_run(case: Mistake, record: dict[str, Any]) -> str:
    """The verdict of the first run, and whether a person called its cause right."""
    words = [agreement(case, record), place(record)]
    return "; ".join([*words, f"cause: {record['cause_is']}"] if "cause_is" in record else words)


def markdown(pairs: Sequence[tuple[Mistake, dict[str, Any]]], precision: str) -> str:
    """A table of all cases, with the verdict of the first run before the one of this run."""
    first = done(_FIRST_RUN)
    rows = [
        "| case | first run | this run | first wrong tensor | cause | truth | text |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, record in pairs:
        before = first.get((case.id, precision))
        cause = record.get("cause")
        truth = f"{case.kind} {case.tensor} (step {case.step}): {case.cause}"
        cells = [case.id, of_first_run(case, before) if before else "-", agreement(case, record)]
        cells += [place(record), cause["id"] if cause else "-"]
        cells += [truth if case.kind != "nothing" else "conforms", record["text"]]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code: 1 if a verdict is not what is expected."""
    parser = _parser()
    options = parser.parse_args(arguments)
    cases = select(options.loop, options.only)
    if not cases:
        parser.error(f"--only must leave a case, got {options.only!r}")
    folder = Path(options.output_dir).resolve()
    path = Path(options.record).resolve() if options.record else folder / "records.jsonl"
    by_id = {case.id: case for case in cases}

    def tell(record: dict[str, Any]) -> None:
        print(line(by_id[record["id"]], record), flush=True)

    records = run_all(cases, options.precision, folder, path, tell)
    pairs = [(by_id[record["id"]], record) for record in records]
    text = markdown(pairs, options.precision)
    (folder / "table.md").write_text(text)
    print(text)
    wrong = [case.id for case, record in pairs if agreement(case, record) != "right"]
    print(f"{len(pairs)} cases, {len(wrong)} not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
