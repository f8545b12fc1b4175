# SPDX-License-Identifier: Apache-2.0
"""Names ranks that leave out an optimizer step which other ranks make.

A step is recorded when it is made. So the records of such a rank are those of later batches, and
whatever is compared from there on differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _bundle
from ._data import CauseId, Finding
from ._mesh import Mesh
from ._sample_sets import samples_of

ID = "step_left_out"


def steps_left_out(reference: Path, run: Path, mesh: Mesh) -> list[Finding]:
    """The first step that some ranks leave out, if other ranks make it on the reference's samples.

    A rank that leaves it out has forward passes whose gradients no step has read, and then samples
    that are not of this step.
    """
    known = _bundle.read_manifest(run)["steps"]
    for step in (s for s in _bundle.read_manifest(reference)["steps"] if s in known):
        usual = _unread(reference, step, 0)
        passes = {rank: _unread(run, step, rank) - usual for rank in range(mesh.size)}
        behind = [rank for rank, more in passes.items() if more > 0]
        others = [rank for rank, more in passes.items() if more == 0]
        if not behind or len(behind) + len(others) < mesh.size:
            continue
        samples = set(samples_of(reference, step, 0))
        if _shared(run, step, behind, samples) > 0 or _shared(run, step, others, samples) < 1:
            return []
        numbers: dict[str, Any] = {"ranks": behind, "passes": passes[behind[0]]}
        cause = CauseId("step_left_out_on_ranks", numbers)
        name, call = _first_stepped(reference, step)
        return [Finding(step, name, ID, cause, behind, kind="param", call=call)]
    return []


def step_left_out(findings: Sequence[Finding]) -> int | None:
    """The step from which on nothing can be compared, because some ranks left it out."""
    return next((finding.step for finding in findings if finding.id == ID), None)


def _unread(directory: Path, step: int, rank: int) -> int:
    return int(_bundle.read_records(directory, step, rank).get("unread", 0))


def _shared(run: Path, step: int, ranks: list[int], samples: set[bytes]) -> float:
    """The share of these ranks' samples that are among some samples; 0 if they have none."""
    own = [sample for rank in ranks for sample in samples_of(run, step, rank)]
    return sum(sample in samples for sample in own) / len(own) if own else 0.0


def _first_stepped(reference: Path, step: int) -> tuple[str, int]:
    """The first parameter that the step changes, and the call that has it after the step."""
    records = _bundle.read_records(reference, step, 0)["records"]
    trained = {r["name"] for r in records if r["kind"] == "grad"}
    of_step = [r for r in records if r["kind"] == "param" and r["name"] in trained]
    name = str(of_step[0]["name"])
    return name, max(int(r["call"]) for r in of_step if r["name"] == name)
