# SPDX-License-Identifier: Apache-2.0
"""Level 3: a verdict on a parallelized model, as one function call in a test."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import _program, _verdict
from ._environment import chosen_precision
from ._float64._notes import read_notes
from ._mesh import mesh_of, parse_mesh
from ._options import Layout, Rename, Transform
from ._places import resolve
from ._precision import (
    FLOAT64,
    NATIVE,
    Outcome,
    forget,
    notes_of,
    self_check,
    why_changed,
    why_failed,
    why_outside,
)
from ._repeat import require_repeat
from ._settle import settle
from ._steps import Batch, Build, Case, Loss, MakeOptimizer, Parallelize, Step
from ._workers import Workers
from .errors import Divergence, RunError

_workers = Workers()


@dataclass
class Report:
    """A verdict: `conforms`, all that the judge says, its report.json, and seconds by part.

    `outcomes` has how each precision ended, `float64` that precision's own report where both were
    judged; `conforms`, `exit_code` and `text` are then of both, `data` and `seconds` native.
    """

    conforms: bool
    exit_code: int
    text: str
    data: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    float64: Report | None = None

    @property
    def verdict(self) -> str:
        """The verdict line."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        words = ("CONFORMS", "DIVERGES", "VACUOUS", "INCOMPLETE")
        found = [line for line in lines if line.startswith(words)] or lines
        return found[-1] if found else ""

    @property
    def card(self) -> str:
        """The verdict line and what is behind it: what broke, why, where and what to look at.

        A line for each precision follows if both were judged.
        """
        card = self.text[max(self.text.rfind(self.verdict), 0) :].partition("\n\n")[0]
        lines = [f"  {outcome.line()}" for outcome in self.outcomes if len(self.outcomes) > 1]
        return "\n".join([card.rstrip(), *lines]) + "\n"


def check(
    build: Build,
    parallelize: Parallelize,
    *,
    mesh: Mapping[str, int] | str,
    batch: Batch,
    optimizer: MakeOptimizer,
    loss: Loss | None = None,
    micro_batches: int = 1,
    steps: int = 1,
    max_grad_norm: float | None = None,
    seed: int = 0,
    name: str = "check",
    rename: Rename | None = None,
    layouts: Mapping[str, Layout] | None = None,
    transform: Transform | None = None,
    not_recorded: Mapping[str, str] | None = None,
    partial: str | None = None,
    grad_scale: float | None = None,
    parallel_reference: bool = False,
    step: Step | None = None,
    raises: bool = True,
    workers: Workers | None = None,
    keep: str | Path | None = None,
    precision: str | None = None,
    generic_weights: bool = True,
    made_by: Sequence[str] | None = None,
) -> Report:
    """Judges a parallelized model against the same model in one process.

    One process trains `build()` on the whole batch, a second time (its bits must be the same), and
    three times with weights moved by one ulp. `mesh` many processes train
    `parallelize(build(), device_mesh)`, each data-parallel rank on its part of the batch. Worker
    processes are kept for later calls.

    Args:
        build: makes the model. It is called after torch.manual_seed(seed) on every rank.
        parallelize: gets the model and a DeviceMesh with the mesh's names; returns the wrapped
            model, a schedule of torch.distributed.pipelining (with its loss_fn, which gets the
            output and the batch; dim pp of the mesh), or None if it changed the model in place;
            or a pair of the model and the framework's own optimizer (None beside an engine).
        mesh: axes from the slowest to the fastest, such as {"dp": 2, "tp": 2}.
        batch: the global batch: a tensor, a tuple, or tensors by name; dim 0 is the samples.
        optimizer: makes the optimizer from the parameters.
        loss: from the model's output and the batch; None: the output or its `.loss`.
        micro_batches: into so many each rank's part is split.
        steps: optimizer steps.
        max_grad_norm: clip gradients to this norm with torch.nn.utils.clip_grad_norm_.
        seed: for build.
        name: of the case, in the report.
        rename: level 2, as in isoshard.record; it applies to both runs.
        layouts: level 2, as in isoshard.record.
        transform: level 2, as in isoshard.record; it applies to both runs.
        not_recorded: level 2; the judge accepts that these are missing.
        partial: patterns of records that may be sums still to be made over ranks.
        grad_scale: the factor on activation gradients; None: the number of data-parallel ranks.
        parallel_reference: the single process calls parallelize, too, with a mesh of one rank. For
            what changes the numbers on one rank, such as mixed precision.
        step: makes one optimizer step from (model, optimizer, micro-batches of this rank), where
            the framework has its own way; None: backward of each micro-batch's loss divided by
            their number, clipping, step and zero_grad. The single process takes it with
            parallel_reference only.
        raises: whether a run that does not conform raises Divergence.
        workers: worker processes other than the shared ones.
        keep: a folder for bundles and reports (report/report.html and .json, and the same in
            float64/); None: they are removed.
        precision: "native", "float64" (all in float64, docs/reference/precision.md) or
            "both"; None: ISOSHARD_PRECISION, or both.
        generic_weights: move all weights that build() makes at random, in all processes alike, so
            that no norm weight is 1 and no bias 0. False where parallelize makes or loads weights
            itself.
        made_by: the words of the command that repeats this, for the reports; None: a comparison of
            the bundles if they are kept, else the command line of this process.

    Raises:
        Divergence: the run does not conform; `.report` is the judge's text.
        RunError: a process failed.
        UsageError: an argument has no meaning.
    """
    __tracebackhide__ = True  # a test that fails shows the verdict, not this function
    axes = parse_mesh(mesh).axes if isinstance(mesh, str) else mesh_of(mesh, _size(mesh)).axes
    options = {
        "rename": rename,
        "layouts": layouts,
        "transform": transform,
        "not_recorded": not_recorded,
        "grad_scale": grad_scale,
    }
    options = {key: value for key, value in options.items() if value is not None}
    case = Case(
        build,
        parallelize,
        axes,
        batch,
        optimizer,
        loss,
        micro_batches,
        steps,
        max_grad_norm,
        seed,
        name,
        parallel_reference=parallel_reference,
        step=step,
        options=options,
        generic_weights=generic_weights,
    )
    case.validate()
    wanted = chosen_precision(precision)
    _program.find()
    folder = Path(keep) if keep is not None else Path(tempfile.mkdtemp(prefix="isoshard-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    if made_by is None and keep is None:
        made_by = sys.orig_argv
    words = _options(partial, grad_scale, made_by)
    try:
        report = _judge(case, folder, workers or _workers, words, wanted)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if raises and not report.conforms:
        raise Divergence(report.card, report.text, report.exit_code)
    return report


def _size(mesh: Mapping[str, int]) -> int:
    size = 1
    for degree in mesh.values():
        size *= degree
    return size


def _options(
    partial: str | None, grad_scale: float | None, made_by: Sequence[str] | None
) -> list[str]:
    """Options of isoshard-judge compare."""
    words = []
    if partial is not None:
        words += ["--partial", partial]
    if grad_scale is not None:
        words += ["--grad-scale", str(grad_scale)]
    if made_by is not None:
        words += ["--made-by", json.dumps(list(made_by))]
    return words


def _judge(
    case: Case, folder: Path, workers: Workers, options: list[str], precision: str
) -> Report:
    start = time.perf_counter()
    native = None
    if precision == FLOAT64:
        workers.run(case, str(folder), reference_only=True)
        _require_repeat(folder)
    else:
        workers.run(case, str(folder))
        _require_repeat(folder)
        native = _compare(case, folder, options, start)
        native.outcomes = [_outcome_of(native, NATIVE)]
        if precision == NATIVE:
            return native
    begun = time.perf_counter()
    report, outcome = _in_float64(case, folder, workers.in_float64(), options)
    outcome.seconds = round(time.perf_counter() - (begun if native is not None else start), 3)
    if native is not None:
        return _of_both(native, report, outcome)
    if report is None:
        raise RunError(f"There is no verdict in float64: {outcome.why}. Judge natively.")
    report.outcomes = [outcome]
    report.text += "\n".join(outcome.lines()) + "\n"
    return report


def _require_repeat(folder: Path) -> None:
    repeat = folder / "reference.repeat"
    if repeat.exists():  # else it had the reference's bits
        require_repeat(folder / "reference", repeat)


def _compare(case: Case, folder: Path, options: list[str], start: float) -> Report:
    """The verdict on a folder's reference and run, which were begun at `start`."""
    ran = time.perf_counter()
    reference, run = folder / "reference", folder / "run"
    notes = settle(reference, run)
    resolve(reference, run)
    mesh = ",".join(f"{axis}={degree}" for axis, degree in case.mesh.items())
    arguments = [str(reference), str(run), "--mesh", mesh, *options]
    reports = folder / "report"
    arguments += ["--output-dir", str(reports), "--report", str(reports / "report.html")]
    arguments.append("--verbose")
    if not_recorded := case.options.get("not_recorded"):
        arguments += ["--not-recorded", ",".join(not_recorded)]
    code, text = _verdict.compare(arguments, reference, run, notes=notes, capture=True)
    if code not in (_verdict.CONFORMS, _verdict.DIVERGES):
        raise RunError(f"The runs could not be compared (exit code {code}):\n{text}")
    path = reports / "report.json"
    data = json.loads(path.read_text()) if path.exists() else {}
    seconds = {"runs": ran - start, "compare": time.perf_counter() - ran}
    return Report(code == 0, code, text, data, seconds)


def _outcome_of(report: Report, precision: str) -> Outcome:
    outcome = Outcome(precision, seconds=round(sum(report.seconds.values()), 3))
    outcome.take(report.exit_code, report.data)
    return outcome


def _in_float64(
    case: Case, native: Path, workers: Workers, options: list[str]
) -> tuple[Report | None, Outcome]:
    """The verdict on the same case in float64, or the reason for none."""
    folder = native / FLOAT64
    folder.mkdir(exist_ok=True)
    forget(folder)
    start = time.perf_counter()
    outcome = Outcome(FLOAT64)
    try:
        workers.run(replace(case, name=f"{case.name} in {FLOAT64}"), str(folder))
        coarsest = read_notes(folder / "reference.logs")[1]
        check = self_check(native / "reference", folder / "reference", coarsest)
        if check.changed:
            outcome.why = why_changed(check.changed)
            return None, outcome
        report = _compare(case, folder, options, start)
    except RunError as error:
        outcome.why = why_failed(folder, error)
        return None, outcome
    if report.exit_code == 1 and (why := why_outside(folder)):
        outcome.why = why
        return None, outcome
    outcome = _outcome_of(report, FLOAT64)
    outcome.notes = notes_of(folder, check)
    return report, outcome


def _of_both(native: Report, float64: Report | None, outcome: Outcome) -> Report:
    """The worse verdict is the last one in the text, where `verdict` and `card` find it."""
    outcomes = [*native.outcomes, outcome]
    reports = [native] if float64 is None else sorted((float64, native), key=_exit_code)
    lines = [line for one in outcomes for line in one.lines()]
    text = "".join(f"{report.text.rstrip()}\n\n" for report in reports) + "\n".join(lines) + "\n"
    return replace(
        native,
        conforms=all(report.conforms for report in reports),
        exit_code=max(map(_exit_code, reports)),
        text=text,
        outcomes=outcomes,
        float64=float64,
    )


def _exit_code(report: Report) -> int:
    return report.exit_code
