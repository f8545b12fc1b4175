# SPDX-License-Identifier: Apache-2.0
"""The command `isoshard`: judge, repro, preflight, convert; and what isoshard-judge does."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import _environment, _program
from ._judge import JudgeOptions, judge
from .errors import BundleError, CheckpointError, Divergence, IsoshardError, UsageError

_USAGE, _BAD_FILE, _INFRASTRUCTURE = 2, 3, 4
#: Passed on to isoshard-judge as they are.
_OF_THE_PROGRAM = ("respond", "bundle")
_COMMANDS = ("judge", "repro", "preflight", "convert", "compare", *_OF_THE_PROGRAM)
#: Commands of the C++ program, which is called isoshard, too.
OF_THE_OTHER = (
    "verify",
    "train",
    "converge",
    "faults",
    "oracle",
    "golden",
    "experiment",
    "bench",
    "report",
    "plot",
    "list",
    "explain",
    "doctor",
)
#: Options of isoshard-judge compare that take a folder.
_OF_FOLDERS = ("--input-dir", "--output-dir", "--config")

#: What begins a command that was not quoted.
_COMMAND = r"python[\d.]*|torchrun|accelerate|deepspeed|mpirun|mpiexec|srun"

_EPILOG = """\
examples
  isoshard judge --mesh dp=2,tp=2 -- torchrun --nproc-per-node 4 train.py --steps 2
  isoshard judge --reference-command 'python train.py --batch-size 8' -- torchrun ... train.py
  isoshard judge --replay -- torchrun --nproc-per-node 2 train.py
  isoshard judge --resume-at 5 -- torchrun --nproc-per-node 2 train.py --checkpoint {run}/ckpt
  isoshard repro runs
  isoshard compare runs/reference runs/mine
  isoshard compare --checkpoint runs/step100 model-resharded
  isoshard preflight --ranks 4 --backend gloo

exit codes: 0 conforms, 1 diverges or vacuous, 2 usage, 3 bad input file, 4 a run failed
"""

_REPRO = """\
Writes a script of at most 60 lines that runs the training script in one process and on its ranks,
and prints the first wrong tensor of both. It needs torch and the training script, not isoshard, and
exits with 1 while the bug is there and with 0 when it is gone. It is run before it is stored.

example
  isoshard judge --output-dir runs -- torchrun --nproc-per-node 2 train.py
  isoshard repro runs && python runs/repro.py

exit codes: 0 a script was written, 1 none shows the tensor, 2 usage, 3 DIR is no folder of judge
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except Divergence as error:
        print(f"DIVERGES  {error}")
        return error.exit_code
    except _Ended as ended:
        print(f"isoshard: ended by {ended.signal.name}; so were all runs", file=sys.stderr)
        return 128 + ended.signal
    except KeyboardInterrupt:
        print("isoshard: ended by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except UsageError as error:
        print(f"isoshard: {error}", file=sys.stderr)
        return _USAGE
    except (BundleError, CheckpointError) as error:
        print(f"isoshard: {error}", file=sys.stderr)
        return _BAD_FILE
    except (IsoshardError, OSError) as error:
        print(f"isoshard: {error}", file=sys.stderr)
        return _INFRASTRUCTURE
    except Exception as error:  # exit code 1 would say that a run diverges
        frame = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"isoshard: this program failed ({type(error).__name__}: {error}, in {frame.name}, "
            f"{Path(frame.filename).name}:{frame.lineno}). Please report it with the command.",
            file=sys.stderr,
        )
        return _INFRASTRUCTURE


def run() -> NoReturn:
    """Runs the command and ends the process.

    `judge` has left nothing to be ended by then, and has imported torch, whose modules Python would
    take a second to take apart.
    """
    code = main()
    if sys.argv[1:2] == ["judge"]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


class _Ended(BaseException):
    """A signal asked this program to end. What runs is ended on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into _Ended; a signal that is ignored stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise _Ended(number)

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _run(words: list[str]) -> int:
    if words[:1] and not words[0].startswith("-"):
        _require_command(words[0])
    if words[:1] == ["convert"] or (words[:1] == ["compare"] and "--checkpoint" in words):
        from . import _convert

        return _convert.command(words[1:]) if words[0] == "convert" else _convert.compare(words)
    if words[:1] == ["compare"]:
        return _compare(words)
    if words[:1] and words[0] in _OF_THE_PROGRAM:
        return _program.call(words)[0]
    command: list[str] = []
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    parser = _parser(words)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(unknown, options.subcommand, words, command)
    if options.subcommand == "preflight":
        return _preflight(options)
    if options.subcommand == "repro":
        return _repro(options)
    with _signals_raise():
        return judge(_judge_options(options, command))


def _refuse(unknown: list[str], subcommand: str, words: list[str], command: list[str]) -> NoReturn:
    """Says what is wrong with words that no option takes."""
    first = unknown[0]
    option = "--reference-command"
    at = words.index(option) if option in words[: words.index(first)] else -1
    if at >= 0 and re.fullmatch(_COMMAND, Path(words[at + 1]).name):
        cut = words.index("--", at) if "--" in words[at:] else len(words)
        raise UsageError(
            f"{option} must be one word for the shell, got {first} behind it. Quote the command of "
            f"one process: {option} {shlex.quote(shlex.join(words[at + 1 : cut]))}"
        )
    if subcommand == "judge" and not command and not first.startswith("-"):
        at = words.index(first)
        raise UsageError(
            f"The command must stand after --, got {first} without it. Write: isoshard "
            f"{shlex.join(words[:at])} -- {shlex.join(words[at:])}"
        )
    name = first.partition("=")[0]
    known = [word for word in _options_of(subcommand) if word.startswith("--")]
    near = difflib.get_close_matches(name, known, 1) if name.startswith("-") else []
    hint = f"did you mean {near[0]}?" if near else f"see isoshard {subcommand} --help."
    raise UsageError(f"{subcommand} has no option or argument {first}; {hint}")


def _options_of(subcommand: str) -> list[str]:
    for action in _parser([subcommand])._actions:
        if isinstance(action, argparse._SubParsersAction):
            return list(action.choices[subcommand]._option_string_actions)
    return []


def _require_command(name: str) -> None:
    if name in _COMMANDS:
        return
    own = f"The commands of this Python package are {', '.join(_COMMANDS)}."
    if name in (*OF_THE_OTHER, "test"):
        raise UsageError(
            f"{name} is a command of the C++ program, which is called isoshard, too: run "
            f"./isoshard {name} in a clone of the project. {own}"
        )
    near = difflib.get_close_matches(name, (*_COMMANDS, *OF_THE_OTHER), 1)
    raise UsageError(
        f"There is no command {name!r}{f'; did you mean {near[0]}?' if near else '.'} {own}"
    )


def _preflight(options: argparse.Namespace) -> int:
    from ._preflight import PreflightOptions, preflight

    given = PreflightOptions(
        ranks=options.ranks,
        backend=options.backend,
        device=options.device,
        json_file=options.json,
        deadline=options.deadline,
        strided=not options.contiguous,
    )
    if options.dtypes is not None:
        given.dtypes = options.dtypes.split(",")
    return preflight(given)


def _repro(options: argparse.Namespace) -> int:
    from ._repro import ReproOptions, repro

    if not options.timeout > 0:
        raise UsageError(f"--timeout must be a number above 0, got {options.timeout:g}.")
    with _signals_raise():
        return repro(ReproOptions(options.folder, options.output, options.timeout))


def _compare(words: list[str]) -> int:
    """isoshard-judge compare, with places resolved first where both bundles are named."""
    at = _bundles_in(words)
    if len(at) != 2:
        return _program.call(words)[0]
    bundles = [Path(words[i]) for i in at]
    _refuse_one_run(*bundles)
    from . import _verdict
    from ._bundle import reseal_is_safe
    from ._data import unread_results
    from ._places import resolved_copy

    # Beside the bundle its big files can be linked.
    beside = bundles[1].resolve().parent
    place = beside if os.access(beside, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix=".isoshard-") as folder:
        try:
            if not reseal_is_safe(bundles[1]):
                return _program.call(words)[0]  # it says what is wrong with the files
            run = resolved_copy(bundles[0], bundles[1], Path(folder) / bundles[1].resolve().name)
        except (BundleError, OSError) as error:
            code = _verdict.check_bundles(*bundles)[0]  # it says what is wrong with the files
            if code == 0:
                print(f"isoshard: {error}", file=sys.stderr)
            return code or _BAD_FILE
        arguments = list(words[1:])
        arguments[at[1] - 1] = str(run)
        if "--made-by" not in words:
            arguments += ["--made-by", json.dumps([*_program.started_as(), *words])]
        return _verdict.compare(arguments, bundles[0], run, notes=unread_results(run))[0]


def _refuse_one_run(reference: Path, run: Path) -> None:
    """Raises if both bundles have the same run id: a run always equals itself."""
    from ._bundle import read_manifest

    try:
        ids = [read_manifest(bundle).get("run") for bundle in (reference, run)]
    except BundleError:
        return  # isoshard-judge says what is wrong with the files
    if ids[0] == ids[1] and ids[0] is not None:
        raise UsageError(
            f"compare must be given two runs, got the run {ids[0]} in {reference} and in {run}. "
            "Record the judged run again; if you set ISOSHARD_RUN_ID, give each run an id of its "
            "own."
        )


def _bundles_in(words: list[str]) -> list[int]:
    """Where a command line names bundles, before or after its options."""
    return [
        i
        for i, word in enumerate(words)
        if (Path(word) / "manifest.json").is_file() and words[i - 1] not in _OF_FOLDERS
    ]


def _judge_options(options: argparse.Namespace, command: list[str]) -> JudgeOptions:
    at_steps, steps = _steps_of(options)
    return JudgeOptions(
        command=command,
        mesh=options.mesh,
        steps=steps,
        reference=options.reference,
        reference_command=options.reference_command,
        output_dir=options.output_dir,
        report=options.report.absolute() if options.report else None,
        made_by=[*_program.started_as(), *sys.argv[1:]],
        execute=options.exec,
        run_to_end=options.run_to_end,
        no_dropout=options.no_dropout,
        options_file=options.options,
        not_recorded=[p for text in options.not_recorded for p in text.split(",")],
        partial=options.partial,
        grad_scale=options.grad_scale,
        loss_reduction=options.loss,
        activations=not options.no_activations,
        keep=options.keep,
        only=[p for text in options.only for p in text.split(",")],
        at_steps=at_steps,
        timeout=options.timeout,
        jobs=options.jobs,
        allow_one_process=options.allow_one_process,
        verbose=options.verbose,
        quiet=options.quiet,
        precision=options.precision,
        generic_weights=options.generic_weights,
        replay=options.replay,
        closer_look=not options.no_closer_look,
        resume_at=options.resume_at,
        resume_command=options.resume_command,
    )


def _steps_of(options: argparse.Namespace) -> tuple[list[int], int]:
    """The steps that are recorded (none: all), and how many the script makes."""
    if options.at_steps is not None and options.from_step is not None:
        raise UsageError("Either --at-steps or --from-step may be given, got both.")
    if options.from_step is not None:
        if options.from_step < 0 or options.steps < 1:
            raise UsageError(
                f"--from-step must be 0 or more and --steps 1 or more, got {options.from_step} and "
                f"{options.steps}."
            )
        last = options.from_step + options.steps
        return (list(range(options.from_step, last)) if options.from_step else []), last
    if options.at_steps is None:
        return [], options.steps
    try:
        at_steps = sorted({int(text) for text in options.at_steps.split(",")})
    except ValueError:
        at_steps = [-1]
    if at_steps[0] < 0:
        raise UsageError(f"--at-steps must be numbers such as 0,3, got {options.at_steps!r}.")
    return at_steps, at_steps[-1] + 1


def _parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
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
    tried = commands.add_parser(
        "preflight",
        help="try every collective of a backend on integers whose result is exact",
        description="Run it by itself, or as the program of torchrun: torchrun --nproc-per-node 4 "
        "-m isoshard preflight. Exit codes: 0 all is right, 1 something is wrong, 2 usage, 4 ranks "
        "hang or died.",
    )
    _add_preflight_options(tried)
    shown = commands.add_parser(
        "repro",
        help="write a script that shows the first wrong tensor without isoshard",
        description=_REPRO,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_repro_options(shown)
    for name, command in (("judge", judged), ("preflight", tried), ("repro", shown)):
        if words[:1] == [name]:
            _environment.take_defaults(command, words)
    commands.add_parser("compare", help="judge one recorded bundle or checkpoint against another")
    commands.add_parser("convert", help="write any checkpoint as a safetensors file")
    commands.add_parser("respond", help="measure by perturbed runs how far a reference moves")
    commands.add_parser("bundle", help="check a bundle")
    return parser


def _add_repro_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="the --output-dir of a judge that diverges")
    add("--output", type=Path, metavar="FILE.py", help="where to write it (default DIR/repro.py)")
    add("--timeout", type=float, default=300.0, help="seconds for one try (default 300)")


def _add_preflight_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, help="processes to start (default 2; under a launcher: its own)")
    add("--backend", default="gloo", help="of torch.distributed (default gloo)")
    add("--device", help="where tensors lie (default: cpu, of nccl the rank's own GPU)")
    add("--dtypes", help="such as fp32,bf16 (default: all)")
    add("--contiguous", action="store_true", help="leave out tensors that are not contiguous")
    add("--json", type=Path, metavar="FILE", help="write all results there")
    add("--deadline", type=float, default=60.0, help="seconds for one case (default 60)")


def _add_judge_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mesh", help="axes from slow to fast, such as dp=2,tp=2 (default: dp over all ranks)")
    add("--steps", type=int, default=2, help="optimizer steps to record (default 2)")
    add(
        "--precision",
        choices=_environment.PRECISIONS,
        default=_environment.PRECISIONS[-1],
        help="judge the script as it is, computed in float64, or both (default both)",
    )
    add("--reference", type=Path, help="a bundle to judge against, or ours: isoshard trains it")
    add("--reference-command", help="the command of the reference (default: one process)")
    add(
        "--replay",
        action="store_true",
        help="each process draws its own samples: give the single process those of the ranks",
    )
    add("--output-dir", type=Path, help="keep bundles, logs and report.json here")
    add(
        "--report", type=Path, metavar="FILE", help="write FILE.html, a page to read (or .json ...)"
    )
    add("--exec", action="store_true", help="run the command untouched, start no ranks by fork")
    add("--run-to-end", action="store_true", help="do not stop the script after the last step")
    add("--no-dropout", action="store_true", help="set dropout to 0 in all runs")
    add(
        "--generic-weights",
        action="store_true",
        help="move all weights alike at random first: no norm weight is 1, no bias 0",
    )
    add("--options", metavar="FILE.py", help="rename, layouts, transform, not_recorded, ...")
    add("--not-recorded", action="append", default=[], help="records that may be missing")
    add("--partial", help="records that may be sums over ranks, such as scalar/loss")
    add(
        "--grad-scale",
        type=float,
        help="factor on activation gradients (default: number of dp ranks; 1 with --loss sum)",
    )
    add("--loss", choices=["avg", "sum"], help="how the ranks' losses make the loss")
    add("--allow-one-process", action="store_true", help="judge a run of one process, too")
    add(
        "--keep",
        choices=["everything", "what_differs"],
        default="everything",
        help="what_differs: ranks compare while they run, and keep what differs",
    )
    add("--only", action="append", default=[], help="record these alone, such as 'param/*'")
    add("--at-steps", help="record these steps alone, such as 0,3 (in place of --steps)")
    add("--from-step", type=int, help="record --steps steps from this one on (default 0)")
    add(
        "--resume-at",
        type=int,
        metavar="K",
        help="stop the run after K steps, start it again, and judge its next steps against those "
        "of an uninterrupted run; {run} in the command is a new folder for the checkpoint",
    )
    add("--resume-command", help="the command of the second start (default: the same again)")
    add(
        "--no-closer-look",
        action="store_true",
        help="do not make the runs once more where a verdict has no cause",
    )
    add("--no-activations", action="store_true", help="record no activations")
    add("--timeout", type=float, default=1800.0, help="seconds for one run")
    add("--jobs", type=int, default=0, help="runs of one process at a time")
    add("--verbose", action="store_true", help="print everything, every tensor too")
    add("--quiet", action="store_true", help="print the last line only")


if __name__ == "__main__":
    run()
