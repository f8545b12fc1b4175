# SPDX-License-Identifier: Apache-2.0
"""The driver of `isoshard judge --resume-at K`: is a resumed training the uninterrupted one?

The command runs uninterrupted, and is recorded from step K on. It runs again, ends when it begins
step K, and is started a third time: its first steps must be those of the uninterrupted run. All
three are on the same ranks, so they should have the same bits. Only where they do not, further runs
show whether the script repeats at all, and how far roundings may move it.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import _launch, _program
from ._course import Steps, course_file
from ._failures import Failure, why_failed
from ._filters import fits
from ._judge import (
    _FIRST_SEED,
    NUM_PERTURBED,
    Driver,
    JudgeOptions,
    _codes_of,
    _errors_of,
    _logs_of,
    _may_have_gpu,
    _words_of,
)
from ._rank_by_rank import first_difference, write_ranks, write_whole
from ._resume_causes import Sides, courses_of, unrestored
from ._seconds import Seconds
from .errors import RunError, UsageError

#: In a command: a folder of the run's own.
PLACE = "{run}"
VARIABLE = "ISOSHARD_RUN_DIR"
_FILES = "run-dirs"
_UNINTERRUPTED, _STOPPED, _RESUMED = "uninterrupted", "stopped", "resumed"
#: Records that two right runs on the same ranks have alike, with no tolerance.
_GIVEN = ("data_id/*", "mask/*", "scalar/learning_rate", "optimizer/*.hyperparameters")


class ResumeDriver(Driver):
    """All runs of a training that is stopped and started again, and the verdict on them."""

    def __init__(self, options: JudgeOptions, folder: Path, seconds: Seconds) -> None:
        _check(options)
        assert options.resume_at is not None
        self.at = options.resume_at
        size = _launch.asked_world_size(options.command)
        is_known = size is not None or _launch.plain_python(options.command) is not None
        options = dataclasses.replace(
            options, precision="native", allow_one_process=options.allow_one_process or is_known
        )
        super().__init__(options, folder, seconds)

    def is_own_reference(self) -> bool:
        """The reference is no single process; this driver says itself what is not seen."""
        return False

    def run(self) -> int:
        """Makes all runs and returns the exit code of the verdict."""
        self.prepare()
        shutil.rmtree(self.folder / _FILES, ignore_errors=True)
        command = self.options.command
        self.say(f"uninterrupted: {shlex.join(command)}, recorded from step {self.at} on ...")
        reference = self._record(_UNINTERRUPTED)
        self.say(f"stopped: the same, until it begins step {self.at} ...")
        self._stop()
        again = self.options.resume_command
        words = command if again is None else _words_of(again, "--resume-command")
        self.say(f"resumed: {shlex.join(words)} ...")
        run = self._record(_RESUMED, words, of=_STOPPED)
        return self._judge(reference, run)

    # -- runs --------------------------------------------------------------------------------

    def _record(
        self,
        name: str,
        command: list[str] | None = None,
        *,
        of: str | None = None,
        seed: int | None = None,
    ) -> Path:
        """Makes one run; `of` is the run in whose folder it goes on."""
        path = self.folder / name
        is_first = of is None
        config = self._config(path, "run", seed)
        config.begin_at = self.at if is_first else 0
        with self.seconds.measure(name):
            process = self._begin(config, command or self.options.command, of or name)
            try:
                self._wait(path, process, is_reference=False)
            except RunError as error:
                raise RunError(f"The {name} run: {error}") from None
        if is_first:
            self._require_files(name)
        return path

    def _stop(self) -> None:
        """Makes the run that ends when it begins the step to resume at."""
        path = self.folder / _STOPPED
        config = self._config(path, "run", None)
        config.end_at = self.at
        with self.seconds.measure(_STOPPED):
            process, _ = self._begin(config, self.options.command, _STOPPED)
            codes = _codes_of(process, self.limit, lambda: None)
        files = [course_file(_logs_of(path), rank) for rank in range(self.mesh.size)]
        is_stopped = all(file.exists() and Steps.read(file).is_stopped for file in files)
        if codes is None or any(codes) or any(_errors_of(path).glob("*.txt")) or not is_stopped:
            failure = Failure(
                errors=_errors_of(path),
                logs=_logs_of(path),
                codes=codes,
                first=getattr(process, "failed_first", None),
                has_bundle=False,
                is_reference=False,
                limit=self.limit,
            )
            raise RunError(f"The stopped run: {why_failed(failure, self.options)}")
        self._require_files(_STOPPED)
        self._require_same_course()

    def _begin(self, config: Any, command: list[str], name: str) -> tuple[Any, str]:
        """Starts a command with a folder of its own."""
        own = self.folder / _FILES / name
        own.mkdir(parents=True, exist_ok=True)
        words = [word.replace(PLACE, str(own)) for word in command]
        launch = None
        if not self.options.execute and not _may_have_gpu():
            launch = _launch.recognise(words)
        self.caches = {**self.caches, VARIABLE: str(own)}
        return self._start(launch, words, config)

    def _config(self, path: Path, subject: str, seed: int | None) -> Any:
        config = super()._config(path, subject, None)
        config.follow, config.perturb = True, seed
        # On the same ranks a script that restores its generators draws the same numbers.
        config.overrides = {**config.overrides, "allow_draws": True, "draws_repeat": True}
        return config

    def _case(self) -> str:
        return f"{super()._case()} from step {self.at} on"

    # -- what must hold before anything is compared ------------------------------------------

    def _require_files(self, name: str) -> None:
        own = self.folder / _FILES / name
        if not any(path.is_file() for path in own.rglob("*")):
            raise UsageError(
                f"The script must save its checkpoint below {PLACE} (or {VARIABLE}) before it "
                f"begins step {self.at}, got no file there in the {name} run. Write {PLACE} where "
                "the command names the checkpoint, and let the script save after "
                f"{self.at} steps."
            )

    def _require_same_course(self) -> None:
        """The stopped run must be the beginning of the uninterrupted one."""
        courses = (
            courses_of(self.folder / name, self.mesh.size) for name in (_UNINTERRUPTED, _STOPPED)
        )
        for rank, (whole, stopped) in enumerate(zip(*courses, strict=True)):
            for step, (wanted, actual) in enumerate(
                zip(whole.weights, stopped.weights, strict=True)
            ):
                if wanted != actual and step == 0:
                    raise RunError(
                        "The stopped run must begin with the weights of the uninterrupted one, got "
                        f"others on rank {rank}. Either its weights are drawn without a seed, or "
                        "it has found a checkpoint of the uninterrupted run, or an older one: "
                        f"write {PLACE} where the command names the checkpoint."
                    )
                is_same = wanted == actual and whole.inputs[step] == stopped.inputs[step]
                if not is_same:
                    what = "weights" if wanted != actual else "inputs"
                    raise RunError(
                        f"The script must repeat bit by bit, got other {what} in step {step} on "
                        f"rank {rank} when it was run again, before it was stopped. Seed what it "
                        "draws (samples, weights), or use torch.use_deterministic_algorithms(True)."
                    )

    # -- verdict -----------------------------------------------------------------------------

    def _judge(self, recorded: Path, resumed: Path) -> int:
        from . import _verdict

        with self.seconds.measure("compare"):
            reference, run = self.folder / "reference", self.folder / "run"
            write_whole(recorded, recorded, reference)
            write_ranks(recorded, resumed, run)
            different = first_difference(recorded, resumed)
        if different is not None and not _is_exact(*different):
            self._measure(recorded, reference)
        with self.seconds.measure("compare"):
            notes = [
                "The reference is the same training uninterrupted, on the same ranks; what both do "
                "wrong is not seen.",
                f"Steps are counted from where the run was resumed: step 0 here is step {self.at} "
                "of the training.",
            ]
            found = unrestored(Sides.of(recorded, resumed, self.at))
            code, _ = _verdict.compare(
                [*self._compare_words(reference, run), "--grad-scale", "1"],
                reference,
                run,
                findings=[],
                causes=[one.cause for one in found],
                notes=notes,
            )
        if not self.options.quiet:
            self._tell_missing_steps(run)
            if not self.options.verbose:  # which has the notes
                print("\n".join(notes), flush=True)
        if self.options.verbose:
            self.say(str(self.seconds))
        return code

    def _measure(self, recorded: Path, reference: Path) -> None:
        """Shows that the script repeats, and how far it moves by roundings."""
        self.say("The bits differ. uninterrupted: once more ...")
        repeat = self._record("repeat")
        different = first_difference(recorded, repeat)
        if different is not None:
            step, (kind, name, _) = different
            raise RunError(
                f"The script must repeat bit by bit, got another {kind} {name} in step "
                f"{step + self.at} when it was run again, uninterrupted. Seed what it draws, or "
                "use torch.use_deterministic_algorithms(True): such noise would hide errors of its "
                "size."
            )
        self.say(f"uninterrupted: {NUM_PERTURBED} times with weights moved by one ulp ...")
        perturbed = []
        for i in range(NUM_PERTURBED):
            moved = self._record(f"moved{i}", seed=_FIRST_SEED + i)
            perturbed.append(self.folder / f"perturbed{i}")
            write_whole(recorded, moved, perturbed[-1])
        _program.respond(reference, perturbed)


def _is_exact(step: int, record: tuple[str, str, int]) -> bool:
    """Whether a record is of what a step is given, or of the weights that a run begins with."""
    kind, name, call = record
    return fits(kind, name, _GIVEN) or (step == 0 and kind == "param" and call == 0)


def _check(options: JudgeOptions) -> None:
    if options.resume_at is None or options.resume_at < 1:
        raise UsageError(
            f"--resume-at must be the number of steps before the stop, 1 or more, got "
            f"{options.resume_at}."
        )
    for option, is_given, why in _not_supported(options):
        if is_given:
            raise UsageError(f"{option} must not be given with --resume-at: {why}. Leave it out.")
    again = options.resume_command
    commands = [options.command]
    if again is not None:
        commands.append(_words_of(again, "--resume-command"))
    for words in commands:
        if not any(PLACE in word for word in words) and not _reads_variable(words):
            raise UsageError(
                f"The command must say where the checkpoint is with {PLACE}, such as "
                f"--checkpoint {PLACE}/checkpoint.pt, got {shlex.join(words)} without it. isoshard "
                "puts a new folder there, so that no run finds the checkpoint of another one. A "
                f"script may also read it from the environment variable {VARIABLE}."
            )


def _not_supported(options: JudgeOptions) -> Iterator[tuple[str, bool, str]]:
    theirs = "the reference is the same command uninterrupted"
    yield "--reference", options.reference is not None, theirs
    yield "--reference-command", options.reference_command is not None, theirs
    yield "--replay", options.replay, theirs
    yield "--at-steps and --from-step", bool(options.at_steps), "recording begins at that step"
    yield "--run-to-end", options.run_to_end, "the run is stopped"
    yield "--grad-scale", options.grad_scale is not None, "both runs have the same scale"
    yield "--generic-weights", options.generic_weights, "the checkpoint has the weights"
    yield (
        "--keep what_differs",
        options.keep != "everything",
        "ranks cannot compare with a reference of several ranks while they run",
    )
    yield (
        "--precision float64",
        options.precision == "float64",
        "two runs on the same ranks have the same bits in any precision",
    )


def _reads_variable(words: list[str]) -> bool:
    """Whether some file that the command names speaks of the folder of its own."""
    for word in words:
        try:
            if Path(word).is_file() and VARIABLE in Path(word).read_text(errors="ignore"):
                return True
        except OSError:
            continue
    return False
