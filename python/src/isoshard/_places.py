# SPDX-License-Identifier: Apache-2.0
"""Places of plain local tensors, from the reference's shapes and the field's conventions.

The judge tries every reading of `"layout": "infer"` and refuses a tie. A run with a bug fits no
reading well, so ties are likely just there. Conventions decide them: samples (dim 0 of
activations and inputs) are cut over the data axes, everything else over the other ones. Where the
ranks' inputs are the reference's in another order, samples lie where their inputs say. A wrong
reading can only raise an alarm.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

from . import _bundle
from ._bundle import Key
from ._mesh import DATA_AXES, Mesh
from ._samples import orders_of, runs_of

_SAMPLE_KINDS = ("activation", "activation_grad", "data_id")


def resolve(reference: Path, run: Path) -> int:
    """Writes boxes for inferred layouts of a run where the convention gives one; how many."""
    manifest = _bundle.read_manifest(run)
    mesh = Mesh({str(a["axis"]): int(a["degree"]) for a in manifest["mesh"]})
    if mesh.size == 1:
        return 0
    resolved = 0
    for step in manifest["steps"]:
        shapes = _shapes_of(reference, step)
        orders = orders_of(reference, run, step, mesh)
        files = [_bundle.read_records(run, step, rank) for rank in range(mesh.size)]
        by_key: dict[Key, list[dict[str, Any] | None]] = {}
        for rank, file in enumerate(files):
            for record in file["records"]:
                key = (step, record["kind"], record["name"], record["call"])
                by_key.setdefault(key, [None] * mesh.size)[rank] = record
        for key, records in by_key.items():
            if key in shapes and _resolve_one(records, shapes[key], mesh, key[1], orders):
                resolved += 1
        for rank, file in enumerate(files):
            _bundle.write_records(run, step, rank, file)
    if resolved:
        _bundle.reseal(run)
    return resolved


def resolved_copy(reference: Path, run: Path, target: Path) -> Path:
    """A copy of a run with its places resolved; big files are hard links where they may be."""
    manifest = _bundle.read_manifest(run)
    for name in [*manifest["files"], _bundle.MANIFEST]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            if not name.endswith(".safetensors"):
                raise OSError
            os.link(run / name, target / name)
        except OSError:
            shutil.copyfile(run / name, target / name)
    resolve(reference, target)
    return target


def _shapes_of(reference: Path, step: int) -> dict[Key, list[int]]:
    if step not in _bundle.read_manifest(reference)["steps"]:
        return {}
    return {
        (step, r["kind"], r["name"], r.get("call", 0)): r["global_shape"]
        for r in _bundle.read_records(reference, step, 0)["records"]
        if "global_shape" in r
    }


def _resolve_one(
    records: list[dict[str, Any] | None],
    whole: list[int],
    mesh: Mesh,
    kind: str,
    orders: list[list[int]] | None,
) -> bool:
    present = [r for r in records if r is not None]
    if len(present) != mesh.size or any(r.get("layout") != "infer" for r in present):
        return False
    shapes = [list(r["local_shape"]) for r in present]
    if any(len(shape) != len(whole) for shape in shapes):
        return False
    offsets = offsets_of(shapes, whole, mesh, kind)
    if offsets is None:
        return False
    for rank, (record, shape, offset) in enumerate(zip(present, shapes, offsets, strict=True)):
        del record["layout"]
        record["global_shape"] = list(whole)
        order = orders[rank] if orders is not None and kind in _SAMPLE_KINDS else None
        record["boxes"] = _boxes(shape, offset, whole, order, mesh.data_degree)
    return True


def _boxes(
    shape: list[int], offset: list[int], whole: list[int], order: list[int] | None, parts: int
) -> list[dict[str, list[int]]]:
    if math.prod(shape) == 0:
        return []
    zeros = [0] * len(shape)
    is_split = bool(shape) and shape[0] < whole[0] and parts > 1
    if order is None or not is_split or shape[0] % len(order) != 0:
        return [{"local_offset": zeros, "global_offset": offset, "size": shape}]
    return [
        {
            "local_offset": [local, *zeros[1:]],
            "global_offset": [begin, *offset[1:]],
            "size": [count, *shape[1:]],
        }
        for local, begin, count in runs_of(order, shape[0] // len(order))
    ]


def offsets_of(
    shapes: list[list[int]], whole: list[int], mesh: Mesh, kind: str
) -> list[list[int]] | None:
    """Where each rank's part begins, or None if no convention fits the shapes."""
    offsets = [[0] * len(whole) for _ in shapes]
    used: set[str] = set()
    for dim, size in enumerate(whole):
        sizes = [shape[dim] for shape in shapes]
        if all(s == size for s in sizes):
            continue
        for axes in _choices(mesh, kind, dim):
            if used & set(axes):
                continue
            found = _offsets_along(sizes, size, mesh, axes)
            if found is not None:
                used |= set(axes)
                for offset, begin in zip(offsets, found, strict=True):
                    offset[dim] = begin
                break
        else:
            return None
    return offsets


def _choices(mesh: Mesh, kind: str, dim: int) -> list[list[str]]:
    """Sets of axes that may cut a dim, the likeliest first."""
    axes = [axis for axis, degree in mesh.axes.items() if degree > 1]
    data = [axis for axis in axes if axis in DATA_AXES]
    others = [axis for axis in axes if axis not in DATA_AXES]
    order = data + others if kind in _SAMPLE_KINDS and dim == 0 else others + data
    choices = [[axis] for axis in order]
    if len(data) > 1:
        choices.insert(0 if order == data + others else len(choices), data)
    return [*choices, axes]


def _offsets_along(sizes: list[int], whole: int, mesh: Mesh, axes: list[str]) -> list[int] | None:
    """Begins of the parts if the ranks of each group along the axes make up the whole."""
    begins = []
    for rank in range(mesh.size):
        group = _group(mesh, rank, axes)
        if sum(sizes[other] for other in group) != whole:
            return None
        begins.append(sum(sizes[other] for other in group[: group.index(rank)]))
    return begins


def _group(mesh: Mesh, rank: int, axes: list[str]) -> list[int]:
    """The ranks that differ from this one along these axes only, in order."""
    group = {rank}
    for axis in axes:
        group = {other for member in group for other in mesh.line(member, axis)}
    return sorted(group)
