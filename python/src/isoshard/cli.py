# SPDX-License-Identifier: Apache-2.0
"""The command `isoshard`: judge, compare, respond."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import _program
from ._judge import JudgeOptions, judge
from .errors import IsoshardError, RecordError, RunError, UsageError

_USAGE, _INFRASTRUCTURE = 2, 4

_EPILOG = """\
examples
  isoshard judge --mesh dp=2,tp=2 -- torchrun --nproc-per-node 4 train.py --steps 2
  isoshard judge --reference-command 'python train.py --batch-size 8' -- torchrun ... train.py
  isoshard compare runs/reference runs/mine

exit codes: 0 conforms, 1 diverges or vacuous, 2 usage, 3 bad input file, 4 a run failed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["compare"]:
            return _program.call(words)[0]
        command: list[str] = []
        if "--" in words:
            at = words.index("--")
            words, command = words[:at], words[at + 1 :]
        options = _parser().parse_args(words)
        if options.subcommand == "respond":
            return _respond(options)
        return judge(_judge_options(options, command))
    except UsageError as error:
        print(f"isoshard: {error}", file=sys.stderr)
        return _USAGE
    except (RunError, RecordError, OSError) as error:
        print(f"isoshard: {error}", file=sys.stderr)
        return _INFRASTRUCTURE
    except IsoshardError as error:
        print(f"isoshard: {error}", file=sys.stderr)
        return 1


def _respond(options: argparse.Namespace) -> int:
    from ._responses import write_responses

    write_responses(options.bundle, options.perturbed)
    return 0


def _judge_options(options: argparse.Namespace, command: list[str]) -> JudgeOptions:
    return JudgeOptions(
        command=command,
        mesh=options.mesh,
        steps=options.steps,
        reference=options.reference,
        reference_command=options.reference_command,
        output_dir=options.output_dir,
        execute=options.exec,
        run_to_end=options.run_to_end,
        no_dropout=options.no_dropout,
        options_file=options.options,
        not_recorded=[p for text in options.not_recorded for p in text.split(",")],
        partial=options.partial,
        grad_scale=options.grad_scale,
        loss_reduction=options.loss,
        activations=not options.no_activations,
        timeout=options.timeout,
        jobs=options.jobs,
        verbose=options.verbose,
        quiet=options.quiet,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isoshard",
        description="Does a parallel PyTorch training step compute what one process computes?",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="subcommand", required=True)
    judged = commands.add_parser(
        "judge",
        help="run a command as it is and in one process, and compare",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_judge_options(judged)
    commands.add_parser("compare", help="judge one recorded bundle against another")
    respond = commands.add_parser("respond", help="write responses.json from perturbed bundles")
    respond.add_argument("bundle", type=Path, metavar="REFERENCE")
    respond.add_argument("perturbed", type=Path, nargs="+", metavar="PERTURBED")
    return parser


def _add_judge_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mesh", help="axes from slow to fast, such as dp=2,tp=2 (default: dp over all ranks)")
    add("--steps", type=int, default=2, help="optimizer steps to record (default 2)")
    add("--reference", type=Path, help="a recorded bundle to judge against")
    add("--reference-command", help="the command of the reference (default: one process)")
    add("--output-dir", type=Path, help="keep bundles, logs and report.json here")
    add("--exec", action="store_true", help="run the command untouched, start no ranks by fork")
    add("--run-to-end", action="store_true", help="do not stop the script after the last step")
    add("--no-dropout", action="store_true", help="set dropout to 0 in all runs")
    add("--options", metavar="FILE.py", help="rename, layouts, transform, not_recorded, ...")
    add("--not-recorded", action="append", default=[], help="records that may be missing")
    add("--partial", help="records that may be sums over ranks, such as scalar/loss")
    add("--grad-scale", help="factor on activation gradients (default: number of dp ranks)")
    add("--loss", choices=["avg", "sum"], help="how the ranks' losses make the loss")
    add("--no-activations", action="store_true", help="record no activations")
    add("--timeout", type=float, default=1800.0, help="seconds for one run")
    add("--jobs", type=int, default=0, help="runs of one process at a time")
    add("--verbose", action="store_true", help="show every tensor")
    add("--quiet", action="store_true", help="print the verdict only")


if __name__ == "__main__":
    sys.exit(main())
