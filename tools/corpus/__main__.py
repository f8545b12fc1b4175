#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Verdict corpus: does a change of the judge change a verdict?

It judges stored runs, or whole runs of this program, and compares what the verdicts say with the
answers that were recorded in fixtures/corpus (docs/internals/corpus.md).
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True

from answers import Answer, AnswerFile, CorpusError, fits, read_json  # noqa: E402
from bundles import record_bundles  # noqa: E402
from pairs import framework_pairs, judge_all, packed_pairs  # noqa: E402
from programs import SETTINGS, Programs  # noqa: E402
from runs import answers_of_run, run_parts  # noqa: E402

TREE = pathlib.Path(__file__).resolve().parents[2]
EQUAL, DIFFERS = 0, 1
EXAMPLE = """examples
  python3 tools/corpus judge                    the stored runs, in less than a minute
  python3 tools/corpus run --output-dir out     whole runs; a second call goes on
  python3 tools/corpus record judge --because "split losses have a cause of their own"

exit codes: 0 equal to the recorded answers, 1 differs, 2 wrong usage, 3 bad input file,
            4 a program broke down or was not built
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    main = argparse.ArgumentParser(
        prog="tools/corpus",
        description=__doc__.split("\n\n")[0],
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--bin",
        type=pathlib.Path,
        default=TREE / "build" / "bin",
        help="folder of isoshard and isoshard-judge, or one of them (default: build/bin)",
    )
    shared.add_argument(
        "--corpus",
        type=pathlib.Path,
        default=TREE / "fixtures" / "corpus",
        help="folder of stored runs and answers (default: fixtures/corpus)",
    )
    shared.add_argument(
        "--output-dir",
        type=pathlib.Path,
        help="folder for unpacked bundles, reports and parts (default: corpus beside --bin)",
    )
    jobs = argparse.ArgumentParser(add_help=False)
    jobs.add_argument("--jobs", type=int, default=2, help="programs at a time (default: 2)")
    compared = argparse.ArgumentParser(add_help=False)
    compared.add_argument(
        "--map",
        type=pathlib.Path,
        help='JSON file of sentences that became ids: {"TEMPLATE": {"id": ID, "numbers": [NAME]}}',
    )
    compared.add_argument(
        "--only",
        default="*",
        metavar="PATTERNS",
        help="pairs (judge) or parts (run) that fit, such as 'ddp/*,frameworks/*'",
    )
    setting = argparse.ArgumentParser(add_help=False)
    setting.add_argument(
        "--setting",
        choices=SETTINGS,
        default="one_thread",
        help="threads and kernels of the programs (default: one_thread)",
    )
    steps = main.add_subparsers(dest="step", required=True, metavar="STEP")
    steps.add_parser(
        "judge", parents=[shared, jobs, compared, setting], help="judge the stored runs and compare"
    )
    steps.add_parser(
        "run",
        parents=[shared, compared, setting],
        help="judge presets, faults, benign variations and the study, and compare; it goes on "
        "where an earlier call with this --output-dir ended",
    )
    record = steps.add_parser("record", help="write answers: record judge, run or bundles")
    whats = record.add_subparsers(dest="what", required=True, metavar="WHAT")
    because = argparse.ArgumentParser(add_help=False)
    because.add_argument("--because", help="why recorded answers change; kept beside them")
    whats.add_parser(
        "judge", parents=[shared, jobs, because], help="judge in all settings, and write judge.json"
    )
    of_run = whats.add_parser(
        "run",
        parents=[shared, because],
        help="write run.json from the folders of finished runs; the first is recorded, what "
        "differs in others is marked as unstable",
    )
    of_run.add_argument("folders", nargs="+", type=pathlib.Path, help="--output-dir of each run")
    of_bundles = whats.add_parser(
        "bundles", parents=[shared], help="make the packs that pairs.json names and are missing"
    )
    of_bundles.add_argument("packs", nargs="*", help="make these, missing or not")
    return main


def judge_stored(given: argparse.Namespace, setting: str, only: str) -> dict[str, Answer]:
    """The stored pairs that fit, in one setting."""
    scratch = given.output_dir / "judge"
    pairs = packed_pairs(given.corpus, scratch / "packs", only)
    pairs += framework_pairs(given.corpus, only)
    if not pairs:
        raise CorpusError(f"--only {only} fits no pair of pairs.json and fixtures/frameworks", 2)
    return judge_all(pairs, Programs(given.bin, setting), scratch, given.jobs)


def compare(
    answers: dict[str, Answer],
    recorded: AnswerFile,
    given: argparse.Namespace,
    is_asked: Callable[[str], bool],
) -> int:
    """Prints what differs. Returns the exit code."""
    if not recorded.answers:
        raise CorpusError(f"{recorded.path}: has no answers yet; make them with record")
    renamed = read_json(given.map) if given.map else {}
    lines = recorded.differences(answers, renamed, is_asked)
    for line in lines:
        print(line)
    wrong = {line.split(": ")[0] for line in lines}
    asked = set(filter(is_asked, answers.keys() | recorded.answers.keys()))
    unstable = sum(len(recorded.unstable.get(key, [])) for key in asked)
    print(
        f"{len(asked - wrong)} of {len(asked)} answers are as recorded "
        f"({unstable} fields are unstable and left out)"
    )
    return DIFFERS if lines else EQUAL


def record(given: argparse.Namespace) -> None:
    """`record judge`, `run` and `bundles`."""
    if given.what == "bundles":
        made = record_bundles(
            given.corpus, Programs(given.bin), given.output_dir / "made", given.packs
        )
        print(f"{len(made)} packs made: {', '.join(made)}")
        return
    if given.what == "judge":
        settings = [judge_stored(given, setting, "*") for setting in SETTINGS]
    else:
        settings = [answers_of_run(folder) for folder in given.folders]
    recorded = AnswerFile.read(given.corpus / f"{given.what}.json")
    changed = recorded.record(settings, given.because)
    recorded.write()
    unstable = sum(map(len, recorded.unstable.values()))
    print(
        f"{recorded.path}: {len(recorded.answers)} answers, {len(changed)} changed, {unstable} "
        "fields unstable"
    )


def main(words: list[str]) -> int:
    """Exit codes: see EXAMPLE."""
    given = parser().parse_args(words)
    given.bin = given.bin.resolve()
    given.bin = given.bin.parent if given.bin.is_file() else given.bin
    given.corpus = given.corpus.resolve()
    given.output_dir = (given.output_dir or given.bin.parent / "corpus").resolve()
    start = time.monotonic()
    try:
        if given.step == "record":
            record(given)
            return EQUAL
        recorded = AnswerFile.read(given.corpus / f"{given.step}.json")
        if given.step == "judge":
            answers = judge_stored(given, given.setting, given.only)
            code = compare(answers, recorded, given, lambda key: fits(key, given.only))
        else:
            folder, programs = given.output_dir, Programs(given.bin, given.setting)
            parts = tuple(f"{part}/" for part in run_parts(folder, programs, given.only))
            code = compare(
                answers_of_run(folder), recorded, given, lambda key: key.startswith(parts)
            )
        print(f"in {time.monotonic() - start:.1f} s")
        return code
    except CorpusError as error:
        print(f"tools/corpus: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
