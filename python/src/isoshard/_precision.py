# SPDX-License-Identifier: Apache-2.0
"""Verdicts in two precisions: the script as it is, and the same computed in float64."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import _bundle, _program
from ._bundle import Entry
from ._dtypes import coarser
from ._float64._notes import read_failed, read_notes, read_outside
from ._judge import BLIND, Driver, JudgeOptions, set_aside
from ._safetensors import OF_NAME
from ._seconds import Seconds
from .errors import Divergence, IsoshardError, RunError, UsageError

NATIVE, FLOAT64 = "native", "float64"
#: In --output-dir: the outcome of each precision.
OUTCOMES = "precisions.json"
_SCHEMA = 1
_CONFORMS, _DIVERGES, _INFRASTRUCTURE = 0, 1, 4
#: A run in float64 is ended after this many times the seconds of the longest native run, and not
#: before it has taken _LEAST_SECONDS.
_MOST_TIMES, _LEAST_SECONDS = 10, 30.0
_DATA = ("data_id", "mask")
_REPORTS = ("report.json", "report.txt", "junit.xml")
BRANCHES = "branches on dtypes, casts and byte sizes are judged by the native run only"


@dataclass
class Outcome:
    """The verdict of one precision: an exit code, or why there is none."""

    precision: str
    code: int | None = None
    status: str = "no verdict"  # as in report.json: conforms, diverges, vacuous, ...
    seconds: float = 0.0
    limit: float | None = None  # seconds that each of its runs might take, if it was judged
    why: str = ""
    notes: list[str] = field(default_factory=list)
    #: largest relative_error, judged share_of_steps, would_miss; as in report.json.
    measured: dict[str, Any] = field(default_factory=dict)

    def take(self, code: int, report: Mapping[str, Any]) -> None:
        """An exit code, and what report.json says of its one case."""
        self.code, self.status = code, f"exit {code}"
        for case in report.get("cases", []):
            self.status = str(case["status"])
            errors = [t["relative_error"] for t in case["tensors"]]
            finite = [e for e in errors if isinstance(e, (int, float)) and math.isfinite(e)]
            self.measured = {
                "relative_error": max(finite, default=None),
                "share_of_steps": case["judged"]["share_of_steps"],
                "would_miss": case["would_miss"],
            }

    def line(self) -> str:
        """One line of the summary."""
        said = f": {self.why}" if self.why else ""
        return f"{self.precision:8} {self.status:10} {self.seconds:6.1f} s{said}"

    def lines(self) -> list[str]:
        """The line, and what the mode changed besides the numbers."""
        return [self.line(), *(f"  {self.precision}: {text}" for text in self.notes)]


def judge(driver: Driver) -> int:
    """Judges in each precision that is asked for; returns the worse exit code."""
    options = driver.options
    why_not = _why_not_in_float64(options)
    if options.precision == FLOAT64 and why_not:
        raise UsageError(f"--precision float64 {why_not}, or use --precision native.")
    _forget_reports(driver)  # after all that is refused
    outcomes: list[Outcome] = []
    if options.precision != FLOAT64:
        with _timed(NATIVE, outcomes) as outcome:
            outcome.limit = driver.limit
            outcome.take(driver.run(), _report_of(driver))
    if options.precision != NATIVE and why_not:
        outcomes.append(Outcome(FLOAT64, why=f"--precision float64 {why_not}"))
    elif options.precision != NATIVE:
        is_alone = options.precision == FLOAT64
        with _timed(FLOAT64, outcomes, may_fail=not is_alone) as outcome:
            _judge_in_float64(driver, outcome, is_alone=is_alone)
    if options.precision != NATIVE:
        for outcome in outcomes:
            print("\n".join([outcome.line()] if options.quiet else outcome.lines()))
    if options.output_dir is not None:
        write_outcomes(outcomes, driver.folder / OUTCOMES)
    code = worse(outcomes)
    is_judged = code in (_CONFORMS, _DIVERGES)
    if is_judged and driver.is_own_reference() and not (options.quiet or options.verbose):
        print(BLIND)  # with --verbose it is among the notes of each verdict
    return code


def worse(outcomes: Iterable[Outcome]) -> int:
    """The largest exit code; where float64 has no verdict, the native one alone counts."""
    codes = [outcome.code for outcome in outcomes if outcome.code is not None]
    return max(codes, default=_INFRASTRUCTURE)


def write_outcomes(outcomes: Iterable[Outcome], file: Path) -> None:
    """Leaves the outcomes for programs to read."""
    content = {"schema": _SCHEMA, "precisions": [dataclasses.asdict(o) for o in outcomes]}
    file.write_text(json.dumps(content, indent=1) + "\n")


def _why_not_in_float64(options: JudgeOptions) -> str:
    """What --precision float64 needs and these options do not give; empty if all is there."""
    if options.reference is not None:
        return f"must make its own reference, got --reference {options.reference}. Leave it out"
    if options.at_steps and 0 not in options.at_steps:
        return (
            "compares step 0 with the native one, so --at-steps must have 0, got "
            f"{','.join(map(str, options.at_steps))}. Add 0"
        )
    return ""


def _forget_reports(driver: Driver) -> None:
    """Nobody must take the reports of an earlier call for those of this one."""
    report = driver.options.report
    for path in [] if report is None else [report, _in_float64(report)]:
        set_aside(path)
    for folder in (driver.folder, driver.folder / FLOAT64):
        forget(folder)
    (driver.folder / OUTCOMES).unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Removes the reports and notes that an earlier call left in its folder."""
    for name in _REPORTS:
        (folder / "report" / name).unlink(missing_ok=True)
    for path in folder.glob("*.logs/*.notes"):
        path.unlink()


def _in_float64(report: Path) -> Path:
    return report.with_stem(f"{report.stem}.{FLOAT64}")


def _report_of(driver: Driver) -> dict[str, Any]:
    """What isoshard-judge wrote, if it could compare."""
    file = driver.folder / "report" / "report.json"
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return content


@contextmanager
def _timed(precision: str, outcomes: list[Outcome], *, may_fail: bool = False) -> Iterator[Outcome]:
    """An outcome that the block fills in. Errors are why there is none, if it may fail."""
    start = time.perf_counter()
    outcome = Outcome(precision)
    try:
        yield outcome
    except Divergence as error:
        print(f"DIVERGES  {error}")
        outcome.code, outcome.status = error.exit_code, "diverges"
    except (IsoshardError, OSError) as error:
        if not may_fail:
            raise
        outcome.why = str(error).strip().partition("\n")[0]
    sys.stdout.flush()
    outcome.seconds = round(time.perf_counter() - start, 3)
    outcomes.append(outcome)


def _judge_in_float64(native: Driver, outcome: Outcome, *, is_alone: bool) -> None:
    """Fills in exit code and status, or why there are none."""
    folder = native.folder / FLOAT64
    given = native.options
    report = given.report if is_alone or given.report is None else _in_float64(given.report)
    limit = math.inf if is_alone else limit_after(native.seconds)
    options = dataclasses.replace(given, report=report)
    driver = Driver(options, folder, Seconds(), FLOAT64, limit)
    outcome.limit = driver.limit
    driver.prepare()
    trusted = native.folder / "reference"
    if is_alone:
        first = dataclasses.replace(given, steps=1, at_steps=[])
        native = Driver(first, native.folder, native.seconds)
        native.make_reference()
        native.make_responses(trusted)
    try:
        reference = driver.make_reference()
        check = self_check(trusted, reference, read_notes(folder / "reference.logs")[1])
        if check.changed:
            outcome.why = why_changed(check.changed)
            return
        driver.make_responses(reference)
        outcome.take(driver.judge_run(reference), _report_of(driver))
    except RunError as error:
        outcome.why = why_failed(folder, error)
        if is_alone or given.verbose:
            print(f"float64: {error}", file=sys.stderr)
        return
    outcome.notes = notes_of(folder, check)
    if outcome.code == _DIVERGES and (why := why_outside(folder)):
        outcome.why = why
        outcome.code, outcome.status = None, "no verdict"
    elif outcome.code not in (_CONFORMS, _DIVERGES):
        outcome.why = f"{_program.NAME} ended with exit code {outcome.code}"
        outcome.code, outcome.status = None, "no verdict"


def limit_after(native: Seconds) -> float:
    """Seconds that a run in float64 may take after native ones of which the longest took some."""
    longest = max(native.parts.get(part, 0.0) for part in ("reference", "run"))
    return max(_LEAST_SECONDS, _MOST_TIMES * longest)


def why_changed(wrong: str) -> str:
    """Why there is no verdict after the self-check found a difference."""
    return f"float64 changed the program: {wrong} is not the native one's"


def why_outside(folder: Path) -> str:
    """Why a difference says nothing, if only the ranks compute outside of torch; else empty."""
    places = read_outside(folder / "reference.logs", folder / "run.logs")
    if not places:
        return ""
    return f"it differs, and numbers pass through numpy on the ranks alone, at {', '.join(places)}"


def notes_of(folder: Path, check: SelfCheck) -> list[str]:
    """What the mode changed in the run, and what its verdict does not cover."""
    return [*read_notes(folder / "run.logs")[0], *check.notes(), BRANCHES]


def why_failed(folder: Path, error: RunError) -> str:
    """Why there is no verdict, in one line: the operation that failed, or else what was printed."""
    failed = read_failed(folder / "reference.logs") or read_failed(folder / "run.logs")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or ["no reason is known"]
    said = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    return f"the script does not run in float64: {failed or said}"


@dataclass(frozen=True)
class SelfCheck:
    """Whether the two references agree, and how much that says."""

    changed: str = ""  #: the first tensor of step 0 that is outside of native tolerances
    weak: str = ""  #: why some comparisons show too little, though none differs

    def notes(self) -> list[str]:
        """Of the outcome."""
        return [f"the self-check shows less than it should: {self.weak}"] if self.weak else []


def self_check(native: Path, float64: Path, coarsest: str | None = None) -> SelfCheck:
    """Compares step 0 of the float64 reference with the native one, within native tolerances.

    The float64 reference is rounded to the dtypes of the native one, and judged as a run against
    it. So everything that the mode may have done to the program is seen, whatever it is.
    `coarsest` is the dtype of 16 bits in which the native program rounds somewhere, though its
    tensors may have a finer one: a reduction in bf16, or autocast.
    """
    with tempfile.TemporaryDirectory(prefix="isoshard-") as folder:
        rounded = Path(folder) / "float64"
        _write_rounded(native, float64, rounded)
        if coarsest is not None:
            native = _with_coarsest(native, Path(folder) / "native", coarsest)
        report = Path(folder) / "report.json"
        words = ["compare", str(native), str(rounded), "--at-steps", "0", "--report", str(report)]
        code, text = _program.call(words, capture=True)
        if code == 0:
            return SelfCheck()
        if not report.exists():
            raise RunError(
                f"The two references must be comparable, got exit code {code} of "
                f"{_program.NAME}:\n{text.strip()}"
            )
        (case,) = json.loads(report.read_text())["cases"]
        if case["status"] == "vacuous":  # nothing differs; the run is judged by the same rules
            return SelfCheck(weak=case["reason"].partition(" Judge in float64")[0])
        return SelfCheck(_first_wrong(case) or text.strip().splitlines()[0])


def _with_coarsest(bundle: Path, copy: Path, dtype: str) -> Path:
    """A copy that has others judged with the tolerances of a dtype, unless it has a coarser one."""
    shutil.copytree(bundle, copy)
    manifest = _bundle.read_manifest(copy)
    judging = manifest["settings"]["judging"]
    own = OF_NAME.get(judging.get("coarsest_dtype", ""))
    if coarser(own, OF_NAME[dtype]) is not own:
        judging["coarsest_dtype"] = dtype
    _bundle.seal(copy, manifest)
    return copy


def _first_wrong(case: dict[str, Any]) -> str | None:
    for finding in case["findings"]:
        return f"{finding['stage']} {finding['name']} (step {finding['step']})"
    return None


def _write_rounded(native: Path, float64: Path, directory: Path) -> None:
    """Step 0 of a run in float64, with the records and dtypes of the native one.

    Later steps have the native data, which are judged, and no tensors, which are not: none of them
    follows from the weights of this step 0.
    """
    run = uuid.uuid4().hex[:16]
    manifest = _bundle.read_manifest(native)
    content = _bundle.read_records(native, 0, 0)
    values, own = _bundle.read_tensors(float64, 0, 0), _bundle.read_tensors(native, 0, 0)
    _bundle.prepare_folder(directory, run)
    taken: dict[str, torch.Tensor] = {}  # what a weight as read was moved by, to be the native one
    entries = []
    for record in content["records"]:
        entry = Entry(record, torch.empty(0))
        value = values.get(entry.tensor_name)
        if value is not None:
            native_value = own[entry.tensor_name]
            is_begun = _is_begun_with(record)
            if not is_begun and record["kind"] == "param":  # the step moves what was read
                value = value + taken.get(record["name"], 0)
            rounded = value.to(OF_NAME[record["dtype"]]).contiguous()
            rounded = _equal_within_roundings(rounded, native_value, is_begun)
            if is_begun and record["kind"] == "param":
                taken[record["name"]] = rounded.double() - value
            entries.append(Entry({**record, "local_shape": list(rounded.shape)}, rounded))
    _bundle.write_rank(directory, run, 0, 0, entries)
    for step in manifest["steps"][1:]:
        later = _bundle.read_tensors(native, step, 0)
        kept = [Entry(r, torch.empty(0)) for r in _bundle.read_records(native, step, 0)["records"]]
        kept = [e for e in kept if e.record["kind"] in _DATA]
        copied = [dataclasses.replace(e, tensor=later[e.tensor_name]) for e in kept]
        _bundle.write_rank(directory, run, 0, step, copied)
    others = {key: value for key, value in manifest.items() if key != "files"}
    _bundle.seal(directory, {**others, "run": run, "subject": "float64"})


def _is_begun_with(record: dict[str, Any]) -> bool:
    """Whether a record of step 0 holds data, or weights as the first forward pass read them."""
    if record["kind"] == "param":
        return bool(record["call"] == 0)
    return record["kind"] in _DATA


def _equal_within_roundings(
    tensor: torch.Tensor, native: torch.Tensor, is_begun_with: bool
) -> torch.Tensor:
    """Takes the native elements where they are no further away than a few roundings are.

    isoshard-judge asks for equal bits where two runs in one dtype have them: in weights and data
    that a run begins with, and where a step adds nothing but weight decay. Weights and data may be
    computed from random numbers (trunc_normal_, orthogonal_, a sum), which is several roundings of
    numbers as large as the largest element. The judge recomputes a step's results from the
    run's own moments, so those may be replaced within fewer roundings.
    """
    if tensor.shape != native.shape or not tensor.is_floating_point() or not native.numel():
        return tensor
    eps, exact = torch.finfo(tensor.dtype).eps, native.double()
    size = exact.abs().nan_to_num(0, 0)  # infinities of a mask are equal or not
    bound = 8 * eps * size.max() if is_begun_with else 2 * eps * size
    is_near = (tensor.double() - exact).abs() <= bound
    return torch.where(is_near, native, tensor)
