#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mutation score: how many small wrong changes of src/ do verify and the tests find?

Seeded mutants are compiled into one build of a copy of this tree, each behind a switch that an
environment variable turns on, so that a mutant costs a run and no build
(docs/internals/mutation.md).
"""

from __future__ import annotations

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from page import Page, equivalents  # noqa: E402
from runs import Runs  # noqa: E402
from scratch import Scratch  # noqa: E402
from sources import MutateError, require_libclang  # noqa: E402

TREE = pathlib.Path(__file__).resolve().parents[2]


def arguments_of(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tools/mutate", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "step",
        choices=["all", "build", "verify", "test", "report"],
        help="build: copy, switches, one build; verify: each mutant under verify --preset "
        "thorough; test: those that survive it under the quick tests; report: tables; all: one "
        "after the other",
    )
    parser.add_argument("--count", type=int, default=300, help="mutants (default: 300)")
    parser.add_argument("--seed", type=int, default=1, help="of their choice (default: 1)")
    parser.add_argument(
        "--scratch", type=pathlib.Path, help="folder of the copy (default: mutants in BUILD)"
    )
    parser.add_argument(
        "--build",
        type=pathlib.Path,
        default=TREE / "build",
        help="a configured build folder, whose compiler and LibTorch are taken (default: build)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--again", nargs="*", default=[], help="keys of mutants to run again")
    parser.add_argument(
        "--at-least", type=float, default=0, help="percent that must be killed, else exit code 1"
    )
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Exit code 0; 1 if too few are killed; 2 for what a user can mend."""
    given = arguments_of(words)
    scratch = Scratch(TREE, (given.scratch or given.build / "mutants").resolve())
    steps = ["build", "verify", "test", "report"] if given.step == "all" else [given.step]
    try:
        if "build" in steps:
            require_libclang()
            scratch.make(given.build, given.count, given.seed, given.jobs)
        runs = Runs(scratch, given.jobs)
        if "verify" in steps:
            runs.verify_all(set(given.again))
        if "test" in steps:
            runs.test_survivors(set(given.again), set(equivalents()))
        page = Page(runs)
        print(page.text())
    except MutateError as error:
        print(f"tools/mutate: {error}", file=sys.stderr)
        return 2
    killed, whole = page.score()
    # none judged is no score
    if 100 * killed < given.at_least * max(whole, 1):
        print(f"{killed} of {whole} killed, {given.at_least} % must be", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
