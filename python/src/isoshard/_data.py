# SPDX-License-Identifier: Apache-2.0
"""Says plainly when the script drew other samples than its single process."""

from __future__ import annotations

from pathlib import Path

from . import _bundle
from ._mesh import Mesh


def check_samples(reference: Path, run: Path) -> list[str]:
    """Sentences about numbers of samples that differ, for the first inputs of the run."""
    manifest = _bundle.read_manifest(run)
    mesh = Mesh({str(a["axis"]): int(a["degree"]) for a in manifest["mesh"]})
    if mesh.data_degree == 1 or not manifest["steps"]:
        return []
    step = manifest["steps"][0]
    if step not in _bundle.read_manifest(reference)["steps"]:
        return []
    wanted = _calls(reference, step)
    actual = _calls(run, step)
    lines = []
    for name in wanted.keys() & actual.keys():
        ours, theirs = wanted[name], actual[name]
        if len(ours) != len(theirs):
            lines.append(
                f"data: the single process calls the model {len(ours)} times in a step, each rank "
                f"{len(theirs)} times ({name}). Both must make the same micro-batches: give "
                "--reference-command with arguments that do."
            )
            break
        if not ours[0] or not theirs[0]:
            continue
        expected = theirs[0][0] * mesh.data_degree
        if ours[0] == theirs[0] and ours[0][0] != expected:
            lines.append(
                f"data: the single process has {ours[0][0]} samples of {name}, each of "
                f"{mesh.data_degree} data-parallel ranks {theirs[0][0]} as well. The script draws "
                "a batch for each process: give --reference-command with a batch size of "
                f"{expected}, or arguments that draw the same samples."
            )
            break
    return lines


def _calls(directory: Path, step: int) -> dict[str, list[list[int]]]:
    calls: dict[str, list[list[int]]] = {}
    for record in _bundle.read_records(directory, step, 0)["records"]:
        if record["kind"] == "data_id":
            calls.setdefault(record["name"], []).append(record["local_shape"])
    return calls
