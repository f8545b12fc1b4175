# SPDX-License-Identifier: Apache-2.0
"""The driver of `isoshard judge`: reference, perturbed runs, the run itself, verdict."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _command, _environment, _extensions, _launch, _program
from ._failures import Failure, why_failed
from ._mesh import Mesh, parse_mesh
from ._processes import end_processes, no_collections
from ._progress import Progress
from ._seconds import Seconds
from .errors import Divergence, RecordError, RunError, UsageError

if TYPE_CHECKING:
    from ._data import Finding
    from ._rank_counts import Parting

NUM_PERTURBED = 3
_DIVERGES, _USAGE, _BAD_FILE = 1, 2, 3  # of isoshard-judge
_FIRST_SEED = 1000
_TICK_SECONDS = 0.2
#: What a verdict against a reference of the same script cannot see.
BLIND = (
    "The reference is the same script in one process; what the script does wrong on its own is not "
    "seen."
)
#: What a verdict on replayed samples cannot see.
REPLAYED = (
    "The single process was given the samples of the ranks (--replay). Which samples a rank takes "
    "is not judged, but for samples that several ranks take or none."
)
_OURS = "ours"  # in place of a bundle: the program isoshard makes the reference
#: What --report may end in, as isoshard-judge writes it.
_REPORT_ENDINGS = (".json", ".txt", ".xml", ".html")
_ERROR_NAMES = r"rank\d+(\.finding)?\.txt"
_LOG_NAMES = r".*\.log|.*\.stack|.*\.notes|.*\.course|modules\.json"


@dataclass
class JudgeOptions:
    """The command line of `isoshard judge`."""

    command: list[str]
    mesh: str | None = None
    steps: int = 2
    reference: Path | None = None
    reference_command: str | None = None
    output_dir: Path | None = None
    report: Path | None = None
    made_by: list[str] = field(default_factory=list)  # the command line that a report names
    execute: bool = False
    run_to_end: bool = False
    no_dropout: bool = False
    options_file: str | None = None
    not_recorded: list[str] = field(default_factory=list)
    partial: str | None = None
    grad_scale: float | None = None
    loss_reduction: str | None = None
    activations: bool = True
    keep: str = "everything"
    only: list[str] = field(default_factory=list)
    at_steps: list[int] = field(default_factory=list)
    allow_one_process: bool = False
    timeout: float = 1800.0
    jobs: int = 0
    verbose: bool = False
    quiet: bool = False
    precision: str = "both"
    generic_weights: bool = False
    replay: bool = False
    closer_look: bool = True
    resume_at: int | None = None
    resume_command: str | None = None


def judge(options: JudgeOptions) -> int:
    """Runs everything and returns the judge's exit code."""
    _check(options)
    _program.find()
    seconds = Seconds()
    keep = options.output_dir
    if keep is not None:
        _require_writable(keep, "--output-dir")
    folder = keep or Path(tempfile.mkdtemp(prefix="isoshard-"))
    try:
        driver = _driver_of(options, folder.resolve(), seconds)
        if options.report is not None:
            _check_report(options.report)
        driver.require_script()
        _command.write(_command_of(options), folder)
        with seconds.measure("imports"), no_collections():
            from . import _precision

        return _precision.judge(driver)
    finally:
        for path in (folder / "caches", folder / "float64" / "caches"):
            shutil.rmtree(path, ignore_errors=True)
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _driver_of(options: JudgeOptions, folder: Path, seconds: Seconds) -> Driver:
    if options.resume_at is None:
        if options.resume_command is not None:
            raise UsageError("--resume-command must be given with --resume-at, got it alone.")
        return Driver(options, folder, seconds)
    from ._resume import ResumeDriver

    return ResumeDriver(options, folder, seconds)


def _command_of(options: JudgeOptions) -> _command.Command:
    """What `isoshard repro` has to know of a run."""
    return _command.Command(
        words=options.command,
        folder=str(Path.cwd()),
        mesh=options.mesh,
        reference=None if options.reference is None else str(options.reference),
        reference_command=options.reference_command,
        loss_reduction=options.loss_reduction,
        options_file=options.options_file,
        no_dropout=options.no_dropout,
        generic_weights=options.generic_weights,
        replay=options.replay,
        resume_at=options.resume_at,
    )


def _check(options: JudgeOptions) -> None:
    if not options.command:
        raise UsageError(
            "A command must follow --, such as: isoshard judge -- torchrun --nproc-per-node 2 "
            "train.py"
        )
    if options.quiet and options.verbose:
        raise UsageError("Either --quiet or --verbose may be given, got both.")
    if options.steps < 1:
        raise UsageError(f"--steps must be 1 or more, got {options.steps}.")
    if options.reference is not None and options.reference_command is not None:
        raise UsageError("Either --reference or --reference-command may be given, got both.")
    for name, number in (("--timeout", options.timeout), ("--grad-scale", options.grad_scale)):
        if number is not None and not 0 < number < math.inf:
            raise UsageError(f"{name} must be a number above 0, got {number:g}.")
    if options.jobs < 0:
        raise UsageError(f"--jobs must be 0 (as many as fit) or more, got {options.jobs}.")
    if options.mesh is not None:
        parse_mesh(options.mesh)
    if options.generic_weights and options.reference is not None:
        raise UsageError(
            "--generic-weights must move the weights of the reference, too, got --reference "
            f"{options.reference}. Leave one of both out."
        )
    if options.replay:
        _check_replay(options)
    if options.reference_command is not None:
        _check_reference_command(options.reference_command)
    if options.options_file is not None:
        _check_options_file(options.options_file)


def _check_replay(options: JudgeOptions) -> None:
    for given, option in (
        (options.reference is not None, f"--reference {options.reference}"),
        (options.keep != "everything", f"--keep {options.keep}"),
    ):
        if given:
            raise UsageError(
                f"--replay must run the ranks before the single process, got {option}. Leave one "
                "of both out."
            )


def _check_reference_command(command: str) -> None:
    words = _words_of(command)
    if not words:
        raise UsageError("--reference-command must be a command, got none.")
    size = _launch.asked_world_size(words)
    if size is not None and size > 1:
        raise UsageError(
            f"--reference-command must start one process, got {size}: whole tensors say where the "
            "ranks' parts lie, and a reference with the bug of the judged run would hide it. "
            f"Leave the launcher out, such as: --reference-command {_example_of(words)}"
        )


def _example_of(words: list[str]) -> str:
    script, arguments = _launch.script_of(words)
    return shlex.quote(shlex.join(["python", *script, *arguments]))


def _check_report(path: Path) -> None:
    """Proves before any run that the report can be written."""
    if path.suffix not in _REPORT_ENDINGS:
        raise UsageError(
            f"--report must end in one of {', '.join(_REPORT_ENDINGS)}, got {path.name}. Name "
            "another file."
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"--report must be a file, got the folder {path}. Name a file in it.")
    _require_writable(path.parent, "--report")


def set_aside(path: Path) -> None:
    """Renames an earlier report to NAME.old, so that nobody takes it for that of a failed run.

    isoshard-judge does so, too, and removes it in the end.
    """
    if path.exists():
        path.replace(path.with_name(path.name + ".old"))


def _require_writable(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"{option} must be in a folder that can be written, got {folder} ({error.strerror}). "
            "Name another folder."
        ) from None


def _words_of(command: str, option: str = "--reference-command") -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise UsageError(
            f"{option} must be a command as a shell reads it, got {error} in {command!r}."
        ) from None


def _check_options_file(path: str) -> None:
    """Runs the file once here, before a run is spent on its mistakes."""
    from ._auto import options_of
    from ._fork import one_thread

    one_thread()  # ranks may be forked from this process
    try:
        options_of(path, {})
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"The options file must run by itself, got {type(error).__name__}: {error} in {path}. "
            "Run it with python."
        ) from None


class Driver:
    """All runs of one precision, and the verdict on them."""

    def __init__(
        self,
        options: JudgeOptions,
        folder: Path,
        seconds: Seconds,
        precision: str = "native",
        limit: float = math.inf,
    ) -> None:
        """`limit`: seconds that each run may take, where that is less than the timeout."""
        self.options, self.folder, self.seconds = options, folder, seconds
        self._given: tuple[list[Finding], list[str]] = ([], [])  # to isoshard-judge
        self.functions_in: str | None = None  # the module of a closer look (_closer)
        self.precision = precision
        self.limit = min(limit, options.timeout)
        self.caches = _environment.caches_of(folder)
        self.launch = None if options.execute else _launch.recognise(options.command)
        if self.launch is not None and _may_have_gpu():
            self.launch = None
        self.is_forked = self.launch is not None
        self.mesh = _mesh_of(options)
        if options.replay:
            from ._replay import require_axes

            require_axes(self.mesh)
        if not self.is_forked and shutil.which(options.command[0]) is None:
            raise RunError(
                f"The command must start a program that is there, got {options.command[0]}."
            )
        self.plain_reference = self._plain_reference()
        self.is_ours = str(options.reference) == _OURS
        if self.is_ours:
            _program.find_trainer()
        elif options.reference is not None:
            mine = {self.folder / "run", self.folder / "report"}
            if options.reference.resolve() in mine:
                raise UsageError(
                    f"--reference must be another folder than the judged run's, got "
                    f"{options.reference}. Give another --output-dir."
                )
            from ._bundle import checked, read_manifest

            with checked(options.reference):  # before a run is spent on it
                read_manifest(options.reference)

    def require_script(self) -> None:
        """Raises where a launcher that is known would start a script that does not exist."""
        launch = self.launch
        if launch is None or launch.is_module or Path(launch.script).exists():
            return
        raise UsageError(
            f"The command must name a script that exists, got {launch.script}, which is not in "
            f"{Path.cwd()}."
        )

    def prepare(self) -> None:
        """Imports what the script imports, where its ranks are forked from this process."""
        options = self.options
        if self.is_forked or self.is_ours or options.reference is None:
            with self.seconds.measure("imports"):
                from . import _fork

                at = _launch.script_at(options.command)
                script = None if at is None else options.command[at]
                _fork.prepare(self.launch.script if self.launch is not None else script)
                if self.precision == "float64":
                    from . import _float64

                    _float64.look_ahead()

    def run(self) -> int:
        """Makes all runs and returns the exit code of the verdict."""
        self.prepare()
        reference = self.options.reference
        if reference is None:
            reference = self.make_reference()
            self.make_responses(reference)
        elif self.is_ours:
            reference = self._make_ours()
        return self.judge_run(reference)

    def run_again(self) -> int:
        """Makes all runs once more, for a closer look; nothing is printed."""
        reference = self.make_reference()
        self.make_responses(reference)
        return self._compare(reference, self._judged_run(), capture=True)

    def _judged_run(self) -> Path:
        """Runs the command, unless --replay has done so."""
        run = self.folder / "run"
        if not self.options.replay:
            self._run_as_it_is(run)
        return run

    def judge_run(self, reference: Path) -> int:
        """Runs the command, and compares it with the reference."""
        from ._rank_counts import where_ranks_part

        run = self._judged_run()
        if parting := where_ranks_part(reference, run):
            return self._judge_parting(reference, run, parting)
        try:
            code = self._compare(reference, run)
        except UsageError:
            if self._judge_replicas(reference, run):
                return _DIVERGES
            raise
        if code in (_USAGE, _BAD_FILE):
            return self._judge_what_can_be(reference, run, code)
        if code == _DIVERGES:
            self._explain(reference, run)
        return code

    def _judge_what_can_be(self, reference: Path, run: Path, code: int) -> int:
        """Judges a run that isoshard-judge rejects, without what it rejects; only an alarm counts.

        `code` is its exit code: for other settings, or for records that do not fit together.
        """
        from ._rank_counts import advice
        from ._remains import copies_without_misfits

        if self.options.reference is not None:
            return code  # it may be of another script
        if code == _USAGE:
            said = "The settings of the two runs differ. The run diverges, too."
            words, trials = ["--allow-different-settings"], iter([(run, list[str](), said)])
        else:
            words, trials = [], copies_without_misfits(run, self.folder)
        for copy, missing, said in trials:
            if self._diverges(reference, copy, missing, words):
                self._judge_again(reference, copy, missing, [*words, *self._of_reports()], said)
                if not self.options.quiet:
                    print(said, flush=True)
                return _DIVERGES
        if self._judge_replicas(reference, run):
            return _DIVERGES
        if hint := advice(reference, run):
            self.say(hint)
        return code

    def _judge_replicas(self, reference: Path, run: Path) -> bool:
        """Whether ranks train apart, which shows without the reference's samples."""
        from ._rank_counts import replicas_apart

        parting = replicas_apart(reference, run)
        return parting is not None and self._judge_parting(reference, run, parting) == _DIVERGES

    def _judge_parting(self, reference: Path, run: Path, parting: Parting) -> int:
        """Judges two runs up to where ranks part, with what is found there."""
        from . import _bundle, _verdict
        from ._places import resolve
        from ._settle import settle

        with self.seconds.measure("compare"), tempfile.TemporaryDirectory(prefix="isoshard-") as f:
            parts = [Path(f) / "reference", Path(f) / "run"]
            for whole, part in zip((reference, run), parts, strict=True):
                _bundle.write_part(whole, part, parting.keeps, parting.keeps_journal)
            notes = settle(*parts)
            resolve(*parts)
            return _verdict.compare(
                self._compare_words(*parts, at_steps=()),  # it may part before any of them
                *parts,
                findings=[parting.finding],
                causes=[],
                notes=[*notes, BLIND] if self.is_own_reference() else notes,
            )[0]

    def _diverges(
        self, reference: Path, run: Path, missing: Sequence[str], words: Sequence[str]
    ) -> bool:
        """Whether a tensor is wrong; a run of which too little is compared does not count.

        A rank without inputs may have had no samples left, which is no mistake.
        """
        from ._closer import findings_of

        with tempfile.TemporaryDirectory(prefix="isoshard-") as folder:
            place = ["--output-dir", str(Path(folder) / "report")]
            code = self._judge_again(reference, run, missing, [*words, *place])
            found = [(f["kind"], f["finding"]["id"]) for f in findings_of(Path(folder))]
            return code == _DIVERGES and bool({*found} - {("data_id", "missing_on_ranks")})

    def _judge_again(
        self,
        reference: Path,
        run: Path,
        missing: Sequence[str],
        words: Sequence[str],
        said: str | None = None,
    ) -> int:
        """The exit code with further arguments; what is said is printed if there is a note."""
        from . import _verdict

        findings, notes = self._given
        return _verdict.compare(
            [*self._compare_words(reference, run, missing=missing, has_reports=False), *words],
            reference,
            run,
            findings=findings,
            notes=notes if said is None else [*notes, said],
            capture=said is None,
        )[0]

    def _of_reports(self) -> list[str]:
        """The arguments of isoshard-judge that say where reports are written."""
        words = ["--output-dir", str(self.folder / "report")]
        if self.options.report is not None:
            words += ["--report", str(self.options.report)]
        return words

    def _explain(self, reference: Path, run: Path) -> None:
        """Adds to the verdict on a run that diverges what takes another look at the data or runs.

        These are whose samples the ranks have, if the data differ, and the function that goes
        wrong, if no cause is known.
        """
        from . import _verdict
        from ._closer import findings_of, look_closer
        from ._data import causes_in_data
        from ._sample_sets import describe_foreign

        first = next(iter(findings_of(self.folder)), None)
        is_data = first is not None and first["kind"] == "data_id" and not self.options.replay
        said = describe_foreign(reference, run) if is_data else []
        with self.seconds.measure("closer look"):
            cause = look_closer(self)
        if not said and cause is None:
            return
        findings, notes = self._given
        notes = [*notes, *said]
        if cause is not None and not isinstance(cause.cause, str):
            words = "".join(cause.cause.words.values())
            said.append(f"A closer look: the first wrong function shows in {words}.")
        if not self.options.quiet:
            print("\n".join(said), flush=True)
        _verdict.compare(
            self._compare_words(reference, run),
            reference,
            run,
            findings=findings,
            causes=[*causes_in_data(reference, run), *([] if cause is None else [cause])],
            notes=notes,
            capture=True,
        )

    # -- reference ---------------------------------------------------------------------------

    def make_reference(self) -> Path:
        """Runs one process."""
        reference = self.folder / "reference"
        if self.options.replay:
            self._run_for_replay()
        self.say("reference: one process ...")
        with self.seconds.measure("reference"):
            self._single([("reference", reference, None)])
            self._require_one_process(reference)
            if reference.with_name("reference.logs").exists():
                from . import _fork

                _fork.learn(reference.with_name("reference.logs"))
        return reference

    def _run_for_replay(self) -> None:
        """Runs the ranks, and plans which of their samples the single process gets."""
        from ._replay import make_plan

        own, run = self.folder / "own", self.folder / "run"
        self._plan_file().unlink(missing_ok=True)
        self.say("own samples: one process ...")
        with self.seconds.measure("own samples"):
            self._single([("reference", own, None)])
        self._run_as_it_is(run)
        make_plan(own, run).write(self._plan_file())

    def _plan_file(self) -> Path:
        return self.folder / "replay.json"

    def _require_one_process(self, reference: Path) -> None:
        """Launchers that are not known here may start several."""
        from ._bundle import read_manifest

        axes = read_manifest(reference)["mesh"]
        size = math.prod(int(axis["degree"]) for axis in axes)
        if size > 1:
            given = self.options.reference_command or shlex.join(self.options.command)
            raise UsageError(
                f"The reference must be one process, got {size} from {given}. A reference with the "
                "bug of the judged run would hide it. Give --reference-command 'python SCRIPT ...'."
            )

    def make_responses(self, reference: Path) -> None:
        """Runs one process again, with moved weights, too; writes how far the reference moves."""
        self.say(f"reference: {NUM_PERTURBED} times with weights moved by one ulp ...")
        perturbed = [self.folder / f"perturbed{i}" for i in range(NUM_PERTURBED)]
        runs: list[tuple[str, Path, int | None]] = []
        runs += [("perturbed", path, _FIRST_SEED + i) for i, path in enumerate(perturbed)]
        repeat = self.folder / "repeat"
        if self.precision == "native":  # in float64 it repeats if it does so here
            runs.insert(0, ("repeat", repeat, None))
        with self.seconds.measure("perturbed"):
            self._single(runs)
        if self.precision == "native":
            from ._repeat import require_repeat

            with self.seconds.measure("repeat"):
                require_repeat(reference, repeat)
                _clear(repeat)
        with self.seconds.measure("responses"):
            _program.respond(reference, perturbed)

    def _make_ours(self) -> Path:
        from . import _ours

        single = self.folder / "single"
        self.say("single: one process, for its weights, samples and settings ...")
        with self.seconds.measure("single"):
            self._single([("single", single, None)])
        self.say("reference: the program isoshard trains the same model ...")
        with self.seconds.measure("reference"):
            return _ours.make(single, self._config_file(), self.folder / "reference")

    def _config_file(self) -> Path:
        return self.folder / "config.json"

    def _single(self, runs: list[tuple[str, Path, int | None]]) -> None:
        """Runs of one process, as many at a time as there are cores."""
        launch, command = self._single_launch()
        waiting = list(runs)
        # Untouched commands may all listen on the same port.
        jobs = self.options.jobs or (min(2, os.cpu_count() or 1) if launch is not None else 1)
        while waiting:
            batch, waiting = waiting[:jobs], waiting[jobs:]
            started = [
                (path, self._start(launch, command, self._config(path, subject, seed)))
                for subject, path, seed in batch
            ]
            try:
                for path, process in started:
                    self._wait(path, process, is_reference=True)
            except BaseException:
                for _, (process, _) in started:
                    _end(process)
                raise

    def _single_launch(self) -> tuple[_launch.Launch | None, list[str]]:
        given = self.options.reference_command
        if given is not None:
            command = _words_of(given)
            plain = self.plain_reference
            launch = None
            if not self.options.execute and not _may_have_gpu():
                is_own = plain is not None and _launch.is_own(command[0])
                launch = plain if is_own else _launch.recognise(command)
            if plain is not None and shutil.which(command[0]) is None:
                command[0] = sys.executable
            return launch, command
        if self.launch is not None:
            return self.launch.single(), []
        at = _launch.script_at(self.options.command)
        if at is None:
            raise UsageError(
                "The single process must be known: no word of the command ends in .py. Give "
                "--reference-command 'python -m my_training' or --reference BUNDLE."
            )
        command = [sys.executable, *self.options.command[at:]]
        # Without a launcher the script starts its ranks itself, and they have to be found.
        if self.options.execute or at < 2 or _may_have_gpu():
            return None, command
        return _launch.Launch("python", 1, command[1], command[2:]), []

    def _plain_reference(self) -> _launch.Launch | None:
        """A reference command that starts Python by itself, as the judged launcher would start it.

        A launcher says to each process which rank it is; scripts read that.
        """
        given = self.options.reference_command
        plain = None if given is None else _launch.plain_python(_words_of(given))
        if plain is not None and self.launch is not None:
            plain.environment = self.launch.environment
            plain.adds_local_rank = self.launch.adds_local_rank
        return plain

    def is_own_reference(self) -> bool:
        """Whether the reference is the judged script itself in one process."""
        given = self.options.reference_command
        if given is None:
            return self.options.reference is None
        of_run, of_reference = (
            _launch.script_of(words)[0] for words in (self.options.command, _words_of(given))
        )
        return of_run == of_reference != []

    def _is_reference_single(self) -> bool:
        """Whether the reference is known to be one process."""
        given = self.options.reference_command
        if given is None or self.plain_reference is not None:
            return True
        return _launch.asked_world_size(_words_of(given)) == 1

    # -- processes ---------------------------------------------------------------------------

    def _config(self, path: Path, subject: str, seed: int | None) -> Any:
        from ._auto import AutoConfig
        from ._bundle import tables

        options = self.options
        overrides: dict[str, Any] = {}
        if options.loss_reduction is not None:
            overrides["loss_reduction"] = options.loss_reduction
        if not options.activations:
            overrides["activations"] = False
        if options.grad_scale is not None:
            overrides["grad_scale"] = options.grad_scale
        is_run = subject == "run"
        if options.only:
            overrides["only"] = options.only
        if options.at_steps:
            overrides["at_steps"] = options.at_steps
        compare_with = None
        if options.keep == "what_differs" and subject not in ("reference", "repeat", "single"):
            given = None if self.is_ours else options.reference
            compare_with = str((given or self.folder / "reference").resolve())
        return AutoConfig(
            directory=str(path),
            mesh=str(self.mesh) if is_run else None,
            steps=options.steps,
            perturb=seed,
            tables=[] if seed is None else tables(self.folder / "reference"),
            stop=not options.run_to_end,
            single=not is_run and self._is_reference_single(),
            subject="script" if is_run else subject,
            case=self._case(),
            no_dropout=options.no_dropout,
            options_file=options.options_file,
            model_config=str(self._config_file()) if subject == "single" else None,
            compare_with=compare_with,
            precision=self.precision,
            generic_weights=options.generic_weights,
            shapes=str(self.folder / "shapes.json") if options.generic_weights else None,
            functions_in=self.functions_in,
            sees_loss_inputs=options.replay,
            replay=str(self._plan_file()) if not is_run and self._plan_file().exists() else None,
            overrides=overrides,
        )

    def _case(self) -> str:
        at = _launch.script_at(self.options.command)
        name = Path(self.options.command[at]).stem if at is not None else "training"
        return name if self.precision == "native" else f"{name} in {self.precision}"

    def _start(
        self, launch: _launch.Launch | None, command: list[str], config: Any
    ) -> tuple[Any, str]:
        """The started processes, and the id that their bundle must have."""
        run = uuid.uuid4().hex[:16]
        _clear(Path(config.directory))
        _extensions.free(self.caches)
        logs = Path(config.directory + ".logs")
        if launch is not None:
            from . import _fork

            return _fork.start(launch, config, logs, run, self.caches), run
        from ._auto import VARIABLE

        logs.mkdir(parents=True, exist_ok=True)
        site = str(Path(__file__).parent / "_site")
        path = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            **self.caches,
            "PYTHONPATH": site if not path else f"{site}{os.pathsep}{path}",
            VARIABLE: config.to_text(),
            "ISOSHARD_RUN_ID": run,
        }
        if config.single:
            from . import _fork

            single = self.plain_reference or _launch.Launch("python", 1, "")
            environment.update(_fork.environment_of(single, 0, _fork.free_port()))
        if shutil.which(command[0]) is None:
            raise RunError(f"The command must start a program that is there, got {command[0]}.")
        log = (logs / "output.log").open("wb")
        with log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        return process, run

    def _wait(self, path: Path, started: tuple[Any, str], *, is_reference: bool) -> None:
        """Accepts a bundle only if it is of this start, and all processes ended well."""
        process, run = started
        progress = Progress(path.name, path, self.options.steps)
        tick = (lambda: None) if self.options.quiet else progress.tick
        try:
            codes = _codes_of(process, self.limit, tick)
        finally:
            progress.end()
        manifest = path / "manifest.json"
        is_there = manifest.exists() and json.loads(manifest.read_text()).get("run") == run
        has_errors = any(_errors_of(path).glob("*.txt"))
        if not is_there or codes is None or any(codes) or has_errors:
            from ._auto import FINDING

            for finding in sorted(_errors_of(path).glob(f"*{FINDING}")):
                raise Divergence(finding.read_text().strip())
            failure = Failure(
                errors=_errors_of(path),
                logs=_logs_of(path),
                codes=codes,
                first=getattr(process, "failed_first", None),
                has_bundle=is_there,
                is_reference=is_reference,
                limit=self.limit,
            )
            raise RunError(why_failed(failure, self.options))

    def _run_as_it_is(self, path: Path) -> None:
        self.say(f"run: {shlex.join(self.options.command)} ...")
        with self.seconds.measure("run"):
            config = self._config(path, "run", None)
            process = self._start(self.launch, self.options.command, config)
            self._wait(path, process, is_reference=False)

    # -- verdict -----------------------------------------------------------------------------

    def _compare(self, reference: Path, run: Path, *, capture: bool = False) -> int:
        from . import _verdict
        from ._batch import refuse_own_batches
        from ._data import unread_results
        from ._places import resolve
        from ._settle import settle

        options = self.options
        with self.seconds.measure("compare"):
            findings = self._findings_of_samples(reference, run)
            has_reference = options.reference is not None and not self.is_ours
            degree = self.mesh.data_degree
            refuse_own_batches(findings, options.command, degree, has_reference)
            notes = [REPLAYED] if options.replay else []
            notes += [*unread_results(run), *settle(reference, run)]
            resolve(reference, run)
            self._given = (findings, [*notes, BLIND] if self.is_own_reference() else notes)
            code, _ = _verdict.compare(
                self._compare_words(reference, run),
                reference,
                run,
                findings=findings,
                notes=self._given[1],
                capture=capture,
            )
            if not options.quiet:
                self._tell_missing_steps(run)
                # With --verbose the verdict has its notes.
                print("".join(f"{n}\n" for n in notes if not options.verbose), end="", flush=True)
        if options.verbose:
            self.say(str(self.seconds))
        return code

    def _findings_of_samples(self, reference: Path, run: Path) -> list[Finding]:
        if self.options.replay:
            from ._sample_sets import check_samples as check_replayed

            return check_replayed(self.folder / "own", run)
        from ._data import check_samples

        return check_samples(reference, run)

    def _compare_words(
        self,
        reference: Path,
        run: Path,
        *,
        missing: Sequence[str] = (),
        has_reports: bool = True,
        at_steps: Sequence[int] | None = None,
    ) -> list[str]:
        """The arguments of isoshard-judge compare.

        `missing` has KIND/NAME of what is not recorded; `at_steps` are those of the options, if not
        given.
        """
        options = self.options
        at_steps = options.at_steps if at_steps is None else at_steps
        arguments = [str(reference), str(run)]
        for flag, value in (
            ("--not-recorded", ",".join([*options.not_recorded, *missing]) or None),
            ("--partial", options.partial),
            ("--grad-scale", options.grad_scale),
            ("--mesh", str(self.mesh)),
            ("--only", ",".join(options.only) or None),
            ("--at-steps", ",".join(map(str, at_steps)) or None),
        ):
            if value is not None:
                arguments += [flag, str(value)]
        if options.verbose:
            arguments.append("--verbose")
        if options.quiet:
            arguments.append("--quiet")
        arguments += ["--seconds-before", f"{self.seconds.total():.3f}"]
        if has_reports:
            arguments += self._of_reports()
        if options.made_by:
            arguments += ["--made-by", json.dumps(options.made_by)]
        return arguments

    def _tell_missing_steps(self, run: Path) -> None:
        """Prints how many of the steps that were asked for the script did not make."""
        from ._bundle import read_manifest

        asked = self.options.at_steps or range(self.options.steps)
        missing = sorted(set(asked) - set(read_manifest(run)["steps"]))
        if missing:
            print(
                f"Judged were {len(asked) - len(missing)} of {len(asked)} steps: the script has "
                f"no step {', '.join(map(str, missing[:4]))}. Let it train for longer, or ask for "
                "fewer with --steps."
            )

    def say(self, text: str) -> None:
        """Prints a line of progress, unless --quiet is given."""
        if not self.options.quiet:
            prefix = "" if self.precision == "native" else f"{self.precision} "
            print(f"{prefix}{text}", file=sys.stderr, flush=True)


def _mesh_of(options: JudgeOptions) -> Mesh:
    """The mesh that the judged run must have: given, or dp over what the launcher is asked for."""
    size = _launch.asked_world_size(options.command)
    if options.mesh is not None:
        mesh = parse_mesh(options.mesh)
    elif size is not None:
        mesh = Mesh({"dp": size})
    elif options.allow_one_process:
        mesh = Mesh({"dp": 1})
    else:
        raise UsageError(
            f"--mesh must be given where the number of processes is not known, got "
            f"{shlex.join(options.command[:4])} ... Give --mesh dp=N, or torchrun with "
            "--nproc-per-node N."
        )
    if size is not None and mesh.size != size:
        raise UsageError(
            f"The product of the mesh's degrees must be the number of processes, got {mesh} "
            f"({mesh.size}) for {size} processes."
        )
    if mesh.size == 1 and not options.allow_one_process:
        raise UsageError(
            "A judged run must have two processes or more, got one: it would be compared with "
            "itself. Give the launcher more, or --allow-one-process."
        )
    return mesh


def _clear(path: Path) -> None:
    """Removes what an older start left: the bundle, its errors and its logs."""
    _bundle_of_ours(path)
    for folder, names in ((_errors_of(path), _ERROR_NAMES), (_logs_of(path), _LOG_NAMES)):
        if folder.exists():
            foreign = [p.name for p in folder.iterdir() if not re.fullmatch(names, p.name)]
            if foreign:
                raise UsageError(
                    f"The folder {folder} must hold what an older run left there, got "
                    f"{foreign[0]}, too. Give another --output-dir."
                )
            shutil.rmtree(folder)


def _bundle_of_ours(path: Path) -> None:
    from ._bundle import remove_bundle

    try:
        remove_bundle(path)
    except RecordError as error:
        raise UsageError(f"{error} (--output-dir)") from None


def _errors_of(path: Path) -> Path:
    return path.with_name(path.name + ".errors")


def _logs_of(path: Path) -> Path:
    return path.with_name(path.name + ".logs")


def _codes_of(process: Any, limit: float, tick: Callable[[], None]) -> list[int] | None:
    """The exit codes; None if the processes had to be ended after `limit` seconds."""
    try:
        if isinstance(process, subprocess.Popen):
            return [_wait_for(process, limit, tick)]
        codes: list[int] = process.wait(limit, tick)
        return codes
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _wait_for(process: subprocess.Popen[bytes], limit: float, tick: Callable[[], None]) -> int:
    end = time.monotonic() + limit
    while True:
        try:
            return process.wait(min(_TICK_SECONDS, max(0.0, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                raise
            tick()


def _end(process: Any) -> None:
    """Ends what still runs of a start."""
    if not isinstance(process, subprocess.Popen):
        process.kill()
    elif process.poll() is None:
        end_processes([process.pid])
        process.wait()


def _may_have_gpu() -> bool:
    """Whether scripts may use CUDA: then nothing is forked, and the command stays untouched."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1"):
        return False
    return Path("/dev/nvidiactl").exists()
