# SPDX-License-Identifier: Apache-2.0
"""`isoshard judge --precision float64|both`: the script as it is, and the same in float64."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import _bundle, _program
from ._bundle import Entry
from ._float64._notes import read_notes
from ._judge import Driver
from ._safetensors import DTYPES, OF_HEADER
from ._seconds import Seconds
from .errors import Divergence, RunError, UsageError

_INFRASTRUCTURE = 4
_TORCH = {name: OF_HEADER[header] for name, header in DTYPES.values()}
_WORDS = {0: "conforms", 1: "diverges"}
_BRANCHES = "branches on dtypes, casts and byte sizes are judged by the native run only"


@dataclass
class Outcome:
    """The verdict of one precision: an exit code, or why there is none."""

    precision: str
    code: int | None
    seconds: float
    why: str = ""
    notes: list[str] = field(default_factory=list)

    def line(self) -> str:
        """One line of the summary."""
        word = "no verdict" if self.code is None else _WORDS.get(self.code, f"exit {self.code}")
        said = f": {self.why}" if self.why else ""
        return f"{self.precision:8} {word:10} {self.seconds:6.1f} s{said}"


def judge(driver: Driver) -> int:
    """Judges in float64, and natively first if both are asked for; returns the worse exit code."""
    options = driver.options
    if options.reference is not None and options.precision == "float64":
        raise UsageError(
            f"--precision float64 must make its own reference, got --reference {options.reference}."
            " Leave one of the two out."
        )
    if options.at_steps and 0 not in options.at_steps:
        raise UsageError(
            "--precision float64 compares step 0 with the native one, so --at-steps must have 0, "
            f"got {','.join(map(str, options.at_steps))}. Add 0, or use --precision native."
        )
    outcomes: list[Outcome] = []
    if options.precision == "both":
        outcomes.append(_timed("native", lambda: (driver.run(), "", [])))
    if options.reference is not None:
        why = "it needs a reference of its own, and --reference names another one"
        outcomes.append(Outcome("float64", None, 0.0, why))
    else:
        outcomes.append(_timed("float64", lambda: _float64(driver)))
    for outcome in outcomes:
        print(outcome.line())
    for text in () if options.quiet else outcomes[-1].notes:
        print(f"  float64: {text}")
    return worse(outcomes)


def worse(outcomes: Iterable[Outcome]) -> int:
    """The largest exit code; where float64 has no verdict, the native one alone counts."""
    codes = [outcome.code for outcome in outcomes if outcome.code is not None]
    return max(codes, default=_INFRASTRUCTURE)


def _timed(precision: str, run: Callable[[], tuple[int | None, str, list[str]]]) -> Outcome:
    """The outcome of a function that judges; errors of a float64 run are the reason for none."""
    start = time.perf_counter()
    code: int | None
    try:
        code, why, notes = run()
    except Divergence as error:
        print(f"DIVERGES  {error}")
        code, why, notes = error.exit_code, "", []
    except RunError as error:
        if precision == "native":
            raise
        code, why, notes = None, f"the script does not run in float64: {error}", []
    sys.stdout.flush()
    return Outcome(precision, code, time.perf_counter() - start, why, notes)


def _float64(native: Driver) -> tuple[int | None, str, list[str]]:
    """Exit code or None, why there is none, and what the mode changed besides the numbers."""
    folder = native.folder / "float64"
    report = native.options.report
    options = dataclasses.replace(
        native.options,
        output_dir=None if native.options.output_dir is None else folder,
        report=None if report is None else report.with_stem(f"{report.stem}.float64"),
    )
    driver = Driver(options, folder, Seconds(), "float64")
    driver.prepare()
    trusted = native.folder / "reference"
    if not trusted.exists():
        first = dataclasses.replace(native.options, steps=1, at_steps=[], output_dir=None)
        native = Driver(first, native.folder, native.seconds)
        native.make_reference()
        native.make_responses(trusted)
    reference = driver.make_reference()
    coarsest = read_notes(folder / "reference.logs")[1]
    wrong = first_difference(trusted, reference, coarsest)
    if wrong is not None:
        return None, f"float64 changed the program: {wrong} is not the native one's", []
    driver.make_responses(reference)
    code = driver.judge_run(reference)
    return code, "", [*read_notes(folder / "run.logs")[0], _BRANCHES]


def first_difference(native: Path, float64: Path, coarsest: str | None = None) -> str | None:
    """The first tensor of step 0 that is outside of native tolerances; None if there is none.

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
            return None
        if not report.exists():
            raise RunError(
                f"The two references must be comparable, got exit code {code} of "
                f"{_program.NAME}:\n{text.strip()}"
            )
        return _first_wrong(json.loads(report.read_text())) or text.strip().splitlines()[0]


def _with_coarsest(bundle: Path, copy: Path, dtype: str) -> Path:
    """A copy that has others judged with the tolerances of a dtype."""
    shutil.copytree(bundle, copy)
    manifest = _bundle.read_manifest(copy)
    manifest["settings"]["judging"].setdefault("coarsest_dtype", dtype)
    _bundle.seal(copy, manifest)
    return copy


def _first_wrong(report: dict[str, Any]) -> str | None:
    for case in report["cases"]:
        for finding in case["findings"]:
            return f"{finding['stage']} {finding['name']} (step {finding['step']})"
    return None


def _write_rounded(native: Path, float64: Path, directory: Path) -> None:
    """Step 0 of a run in float64, with the records and dtypes of the native one.

    Later steps are the native ones: their data are judged even where their tensors are not.
    """
    run = uuid.uuid4().hex[:16]
    manifest = _bundle.read_manifest(native)
    content = _bundle.read_records(native, 0, 0)
    values, own = _bundle.read_tensors(float64, 0, 0), _bundle.read_tensors(native, 0, 0)
    _bundle.prepare_folder(directory, run)
    entries = []
    for record in content["records"]:
        entry = Entry(record, torch.empty(0))
        value = values.get(entry.tensor_name)
        if value is not None:
            rounded = value.to(_TORCH[record["dtype"]]).contiguous()
            native_value = own[entry.tensor_name]
            rounded = _equal_within_roundings(rounded, native_value, _is_weight_or_data(record))
            entries.append(Entry({**record, "local_shape": list(value.shape)}, rounded))
    _bundle.write_rank(directory, run, 0, 0, entries)
    for step in manifest["steps"][1:]:
        later = _bundle.read_tensors(native, step, 0)
        kept = [Entry(r, torch.empty(0)) for r in _bundle.read_records(native, step, 0)["records"]]
        copied = [dataclasses.replace(e, tensor=later[e.tensor_name]) for e in kept]
        _bundle.write_rank(directory, run, 0, step, copied)
    others = {key: value for key, value in manifest.items() if key != "files"}
    _bundle.seal(directory, {**others, "run": run, "subject": "float64"})


def _is_weight_or_data(record: dict[str, Any]) -> bool:
    return record["kind"] in ("data_id", "mask", "param") or record["name"].endswith(".master")


def _equal_within_roundings(
    tensor: torch.Tensor, native: torch.Tensor, is_weight_or_data: bool
) -> torch.Tensor:
    """Takes the native elements where they are no further away than a few roundings are.

    isoshard-judge asks for equal bits where two runs in one dtype have them: in weights and data
    that a run begins with, and where a step adds nothing but weight decay. Weights and data may be
    computed from random numbers (trunc_normal_, orthogonal_, a sum), which is several roundings of
    numbers as large as the largest element.
    """
    if tensor.shape != native.shape or not tensor.is_floating_point() or not native.numel():
        return tensor
    eps, exact = torch.finfo(tensor.dtype).eps, native.double()
    size = exact.abs().nan_to_num(0, 0)  # infinities of a mask are equal or not
    bound = 8 * eps * size.max() if is_weight_or_data else 2 * eps * size
    is_near = (tensor.double() - exact).abs() <= bound
    return torch.where(is_near, native, tensor)
