# SPDX-License-Identifier: Apache-2.0
"""Level 3: a verdict on a parallelized model, as one function call in a test."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import _program, _verdict
from ._mesh import mesh_of, parse_mesh
from ._options import Layout, Rename, Transform
from ._places import resolve
from ._steps import Batch, Build, Case, Loss, MakeOptimizer, Parallelize, Step
from ._workers import Workers
from .errors import Divergence, RunError

_workers = Workers()


@dataclass
class Report:
    """A verdict: `conforms`, all that the judge says, its report.json, and seconds by part."""

    conforms: bool
    exit_code: int
    text: str
    data: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The verdict line."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        words = ("CONFORMS", "DIVERGES", "VACUOUS", "INCOMPLETE")
        found = [line for line in lines if line.startswith(words)] or lines
        return found[-1] if found else ""

    @property
    def card(self) -> str:
        """The verdict line and what is behind it: what broke, why, where and what to look at."""
        return self.text[max(self.text.rfind(self.verdict), 0) :]


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
) -> Report:
    """Judges a parallelized model against the same model in one process.

    One process trains `build()` on the whole batch, and three times with weights moved by one
    ulp. `mesh` many processes train `parallelize(build(), device_mesh)`, each data-parallel rank
    on its part of the batch. Worker processes are kept for later calls.

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
        keep: a folder for bundles and report; None: they are removed.

    Raises:
        Divergence: the run does not conform; `.report` is the judge's text.
        RunError: a process failed.
        UsageError: an argument has no meaning.
    """
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
    )
    case.validate()
    _program.find()
    folder = Path(keep) if keep is not None else Path(tempfile.mkdtemp(prefix="isoshard-check-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        report = _judge(case, folder, workers or _workers, not_recorded, partial, grad_scale)
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


def _judge(
    case: Case,
    folder: Path,
    workers: Workers,
    not_recorded: Mapping[str, str] | None,
    partial: str | None,
    grad_scale: float | None,
) -> Report:
    start = time.perf_counter()
    workers.run(case, str(folder))
    ran = time.perf_counter()
    reference, run = folder / "reference", folder / "run"
    resolve(reference, run)
    mesh = ",".join(f"{axis}={degree}" for axis, degree in case.mesh.items())
    arguments = [str(reference), str(run), "--mesh", mesh]
    arguments += ["--output-dir", str(folder / "report"), "--verbose"]
    if not_recorded:
        arguments += ["--not-recorded", ",".join(not_recorded)]
    if partial is not None:
        arguments += ["--partial", partial]
    if grad_scale is not None:
        arguments += ["--grad-scale", str(grad_scale)]
    code, text = _verdict.compare(arguments, reference, run, capture=True)
    if code not in (_verdict.CONFORMS, _verdict.DIVERGES):
        raise RunError(f"The runs could not be compared (exit code {code}):\n{text}")
    path = folder / "report" / "report.json"
    data = json.loads(path.read_text()) if path.exists() else {}
    seconds = {"runs": ran - start, "compare": time.perf_counter() - ran}
    return Report(code == 0, code, text, data, seconds)
