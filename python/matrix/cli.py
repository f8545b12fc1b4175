# SPDX-License-Identifier: Apache-2.0
"""The command line of the matrix."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from isoshard._environment import PRECISIONS

from .expect import expected_of
from .families import all_specs
from .run import run_all
from .spec import Spec

_EPILOG = """\
Each case trains a tiny model in one process and parallelized, and has isoshard.check judge it.
Results are lines of JSON in DIR/results.jsonl; a case that has one is not run again.
Exit codes: 0, 1 (a case is not what is expected of it), 2 (wrong arguments).

Example:
  cd python && PYTHONPATH=src python -m matrix --output-dir runs/matrix --framework 'fsdp2*'
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m matrix",
        description="Judges generated training runs of many frameworks.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output-dir", metavar="DIR", help="where results are kept")
    parser.add_argument("--framework", metavar="GLOB", default="*", help="only these frameworks")
    parser.add_argument("--architecture", metavar="GLOB", default="*", help="only these models")
    parser.add_argument("--case", metavar="GLOB", default="*", help="only cases with such an id")
    parser.add_argument("--expect", metavar="WORD", help="only cases of which this is expected")
    parser.add_argument("--limit", metavar="N", type=int, help="at most so many cases")
    parser.add_argument("--seed", metavar="N", type=int, help="which cases --limit draws")
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=60.0, help="seconds of a case (default 60)"
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, help="as of isoshard judge (default both)"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and run none")
    return parser


def select(options: argparse.Namespace) -> list[tuple[str, Spec]]:
    """The cases that the filters leave, family by family."""
    cases = [
        (name, spec)
        for name, spec in all_specs()
        if fnmatchcase(spec.framework, options.framework)
        and fnmatchcase(spec.architecture, options.architecture)
        and fnmatchcase(spec.id, options.case)
        and options.expect in (None, expected_of(spec).outcome)
    ]
    if options.limit is not None and options.limit < len(cases):
        if options.seed is None:
            return cases[: options.limit]
        drawn = set(random.Random(options.seed).sample(range(len(cases)), options.limit))
        cases = [case for i, case in enumerate(cases) if i in drawn]
    return cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    cases = select(options)
    if options.list:
        for _, spec in cases:
            print(f"{expected_of(spec).outcome:10} {spec.id}")
        return 0
    if options.output_dir is None:
        parser.error("--output-dir must name a folder for the results")
    if not cases:
        parser.error("the filters must leave a case, got none (--list shows all)")
    counts: Counter[str] = Counter()
    is_terminal = sys.stderr.isatty()

    def tell(result: dict[str, Any]) -> None:
        counts["as expected" if result["is_met"] else "not as expected"] += 1
        number = sum(counts.values())
        if is_terminal:
            text = f"{number}/{len(cases)} {result['id']}"
            print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)
        if not result["is_met"]:
            end = "\r\033[K" if is_terminal else ""
            print(
                f"{end}{result['id']}\n    expected {result['expected']}, got "
                f"{result['outcome']}: {result['verdict']}",
                flush=True,
            )

    results = run_all(
        cases,
        Path(options.output_dir),
        timeout=options.timeout,
        tell=tell,
        precision=options.precision,
    )
    if is_terminal:
        print("\r\033[K", end="", file=sys.stderr)
    for outcome, count in sorted(Counter(r["outcome"] for r in results).items()):
        print(f"{count:5} {outcome}")
    in_float64 = [o["status"] for r in results for o in r.get("precisions", [])[1:]]
    for status, count in sorted(Counter(in_float64).items()):
        print(f"{count:5} {status} in float64")
    wrong = counts["not as expected"]
    print(f"{len(results)} cases, {wrong} not as expected")
    return 1 if wrong else 0
