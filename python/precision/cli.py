# SPDX-License-Identifier: Apache-2.0
"""The command line: which table to make."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from . import architectures, bugs, examples, scales
from .judged import Judge, row_of
from .kept import Kept

_TABLES = {
    "examples": (Judge, examples.commands),
    "architectures": (Judge, architectures.commands),
    "scales": (Kept, scales.commands),
    "bugs": (Kept, bugs.commands),
}
_EPILOG = """\
Rows are appended to DIR/TABLE.csv; what has rows there is not run again.

Example:
  cd python && PYTHONPATH=src python -m precision scales --output-dir runs/precision
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m precision",
        description="Judges scripts in both precisions, and writes a table of the verdicts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", choices=_TABLES, help="what is judged")
    parser.add_argument("--output-dir", metavar="DIR", required=True, help="where tables are kept")
    parser.add_argument("--case", metavar="GLOB", default="*", help="only such rows")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of bugs (default 0)")
    parser.add_argument("--number", metavar="N", type=int, default=100, help="of bugs")
    return parser


def _done(path: Path) -> Iterator[dict[str, str]]:
    if path.exists():
        with path.open() as file:
            yield from csv.DictReader(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    folder = Path(options.output_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{options.table}.csv"
    known = {row["name"] for row in _done(path)}
    kind, commands = _TABLES[options.table]
    judge: Any = kind(folder)
    try:
        for name, more, *words in commands(folder, options):
            if name not in known and fnmatchcase(name, options.case):
                verdicts = judge(*words)
                rows = [row_of(name, p, verdict, **more) for p, verdict in verdicts.items()]
                _append(path, rows)
                for row in rows:
                    print(" ".join(str(value) for value in row.values()), flush=True)
    finally:
        judge.close()
    return 0


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
