# SPDX-License-Identifier: Apache-2.0
"""Places of plain local tensors, from the reference's shapes and values and from conventions.

The judge tries every reading of `"layout": "infer"` and refuses a tie. A run with a bug fits no
reading well, so ties are likely just there. Here a reading that alone fits the shapes counts; of
several the one whose values are clearly nearer the reference's; else conventions decide: samples
(dim 0 of activations and inputs) are cut over the data axes, everything else over the other ones.
Where the ranks' inputs are the reference's in another order, samples lie where their inputs say.
A wrong reading can only raise an alarm.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _bundle
from ._bundle import Key
from ._dtensor import Box
from ._mesh import DATA_AXES, Mesh
from ._samples import Order, orders_of, runs_of
from .errors import BundleError

_SAMPLE_KINDS = ("activation", "activation_grad", "data_id")


#: How much nearer than the next best the values of a reading must be (squared error).
_CLEARLY = 0.01


@dataclass(frozen=True)
class Reading:
    """One way to lay out a tensor: where each rank's part begins, and which axes cut each dim."""

    offsets: list[list[int]]
    axes: dict[int, list[str]]
    #: An axis with more ranks than parts: neighbours hold the same part, as key and value heads do.
    shared: str | None = None


#: Where each rank's boxes lie, and the axes over which ranks with the same box are added up.
Layout = tuple[list[list[Box]], tuple[str, ...]]


def resolve(reference: Path, run: Path) -> int:
    """Writes boxes for inferred layouts of a run where one reading is chosen; how many."""
    resolved, changed = _resolved(reference, run)
    for (step, rank), content in changed.items():
        _bundle.write_records(run, step, rank, content)
    if changed:
        _bundle.reseal(run)
    return resolved


def resolved_copy(reference: Path, run: Path, target: Path) -> Path:
    """A copy of a run with its places resolved, or the run itself where there are none to resolve.

    Big files are hard links where they may be.
    """
    _, changed = _resolved(reference, run)
    if not changed:
        return run
    manifest = _bundle.read_manifest(run)
    for name in [*_bundle.files_of(manifest, run), _bundle.MANIFEST]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            if not name.endswith(".safetensors"):
                raise OSError
            os.link(run / name, target / name)
        except OSError:
            shutil.copyfile(run / name, target / name)
    for (step, rank), content in changed.items():
        _bundle.write_records(target, step, rank, content)
    _bundle.reseal(target)
    return target


def _resolved(reference: Path, run: Path) -> tuple[int, dict[tuple[int, int], dict[str, Any]]]:
    """How many tensors were resolved, and what the changed files of steps and ranks say then."""
    changed: dict[tuple[int, int], dict[str, Any]] = {}
    resolved = 0
    with _bundle.checked(run):
        manifest = _bundle.read_manifest(run)
        mesh = Mesh.from_json(manifest["mesh"])
        if mesh.size == 1:
            return 0, {}
        for step in manifest["steps"]:
            files = [_bundle.read_records(run, step, rank) for rank in range(mesh.size)]
            by_key: dict[Key, list[dict[str, Any] | None]] = {}
            for rank, file in enumerate(files):
                for record in file["records"]:
                    key = (step, record["kind"], record["name"], record["call"])
                    by_key.setdefault(key, [None] * mesh.size)[rank] = record
            for key, records in by_key.items():
                _check_stages(key, records)
            shapes = shapes_of(reference, step)
            values = _Values(reference, run, step, mesh.size)
            order = orders_of(reference, run, step, mesh)
            before = resolved
            for key, records in by_key.items():
                if key in shapes and _resolve_one(key, records, shapes[key], mesh, order, values):
                    resolved += 1
            if resolved > before:  # a tensor is resolved on all ranks
                changed.update({(step, rank): file for rank, file in enumerate(files)})
    return resolved, changed


def shapes_of(reference: Path, step: int) -> dict[Key, list[int]]:
    """The shapes of a step's whole tensors, as the reference has them."""
    if step not in _bundle.read_manifest(reference)["steps"]:
        return {}
    return {
        (step, r["kind"], r["name"], r["call"]): r["global_shape"]
        for r in _bundle.read_records(reference, step, 0)["records"]
        if "global_shape" in r
    }


class _Values:
    """The tensors of a step, read where several readings fit the shapes."""

    def __init__(self, reference: Path, run: Path, step: int, ranks: int) -> None:
        self._paths = [(reference, 0), *((run, rank) for rank in range(ranks))]
        self._step = step
        self._tensors: list[dict[str, torch.Tensor]] = []
        self._scales: dict[str, float] = {}

    def of(self, key: Key, ranks: list[int]) -> list[torch.Tensor]:
        """The reference's tensor and these ranks', in fp64 and without factors on gradients."""
        if not self._tensors:
            for path, rank in self._paths:
                self._tensors.append(_bundle.read_tensors(path, self._step, rank))
            records = _bundle.read_records(self._paths[0][0], self._step, 0)["records"]
            self._scales = {_name(r): _bundle.grad_scale_of(r) for r in records}
        name = f"{key[1]}/{key[2]}/{key[3]}"
        whole, *local = [self._tensors[i][name].double() for i in (0, *(r + 1 for r in ranks))]
        return [whole / self._scales.get(name, 1.0), *local]


def _name(record: dict[str, Any]) -> str:
    return f"{record['kind']}/{record['name']}/{record['call']}"


@dataclass(frozen=True)
class Candidates:
    """The ways in which a tensor may lie, the likeliest by convention first."""

    whole: list[int]
    ranks: list[int]  # that hold it
    inner: Mesh  # of those ranks
    layouts: list[Layout]

    def nearest(self, errors: list[float]) -> int:
        """The layout that is clearly the nearest, else the first one."""
        return _nearest(errors)


def candidates_of(
    key: Key,
    records: list[dict[str, Any] | None],
    whole: list[int],
    mesh: Mesh,
    order: Order | None,
) -> Candidates | None:
    """All ways to lay out a tensor whose ranks leave that open; None if there are none."""
    ranks = [rank for rank, record in enumerate(records) if record is not None]
    present = [r for r in records if r is not None]
    if any(r.get("layout") != "infer" for r in present) or ranks != _holders(present[0], mesh):
        return None
    shapes = [list(r["local_shape"]) for r in present]
    if any(len(shape) != len(whole) for shape in shapes):
        return None
    kind = key[1]
    # Ranks of one stage of a pipeline are a mesh of their own.
    inner = mesh if len(ranks) == mesh.size else _without(mesh, _only_at(present[0]))
    readings = readings_of(shapes, whole, inner, kind)
    if not readings:
        return None
    of_samples = None
    if order is not None and kind in _SAMPLE_KINDS:
        of_samples = [order.samples[rank] for rank in ranks]
    is_head_tail = order is not None and order.is_head_tail
    layouts: list[Layout] = []
    for reading in readings:
        boxes = _boxes_of(reading, shapes, whole, inner, of_samples)
        added = _added_over(reading, inner) if kind == "activation_grad" else ()
        if added:
            layouts.append((boxes, added))
        layouts.append((boxes, ()))
        balanced = _head_and_tail(reading, shapes, whole, boxes, kind)
        if balanced is not None:
            layouts.insert(len(layouts) - 1 if is_head_tail else len(layouts), (balanced, ()))
    return Candidates(whole, ranks, inner, layouts)


def _resolve_one(
    key: Key,
    records: list[dict[str, Any] | None],
    whole: list[int],
    mesh: Mesh,
    order: Order | None,
    values: _Values,
) -> bool:
    candidates = candidates_of(key, records, whole, mesh, order)
    if candidates is None:
        return False
    ranks, inner, layouts = candidates.ranks, candidates.inner, candidates.layouts
    present = [r for r in records if r is not None]
    chosen = 0
    if len(layouts) > 1:
        reference, *local = values.of(key, ranks)
        if list(reference.shape) != whole:  # a share, of a reference of several ranks
            layouts = layouts[:1]
        scales = [_bundle.grad_scale_of(r) for r in present]
        local = [tensor / scale for tensor, scale in zip(local, scales, strict=True)]
        if len(layouts) > 1:
            chosen = _nearest([_error(reference, local, layout, inner) for layout in layouts])
    for i, record in enumerate(present):
        apply_layout(record, whole, layouts[chosen], i)
    return True


def apply_layout(record: dict[str, Any], whole: list[int], layout: Layout, at: int) -> None:
    """Writes a layout into the record of the rank that is the `at`th one to hold the tensor."""
    boxes, added = layout
    del record["layout"]
    record["global_shape"] = list(whole)
    record["boxes"] = boxes[at]
    partial = [{"axis": axis, "kind": "partial", "reduction": "sum"} for axis in added]
    if partial:
        record["placements"] = [*record.get("placements", []), *partial]


def _added_over(reading: Reading, mesh: Mesh) -> tuple[str, ...]:
    """Axes over which the gradient of an output with copies is a sum.

    Each copy of key and value heads is used by other heads. What does not depend on the samples,
    such as embeddings of positions without a batch dim, is used by the samples of each data rank.
    """
    cut = {axis for axes in reading.axes.values() for axis in axes}
    data = [axis for axis, degree in mesh.axes.items() if axis in DATA_AXES and degree > 1]
    shared = [reading.shared] if reading.shared is not None else []
    return tuple([*(data if cut.isdisjoint(data) else []), *shared])


def _only_at(record: dict[str, Any]) -> dict[str, int]:
    """The coordinates at which alone a tensor is held."""
    return {
        p["axis"]: p["coordinate"] for p in record.get("placements", []) if p["kind"] == "only_at"
    }


def _check_stages(key: Key, records: list[dict[str, Any] | None]) -> None:
    only = [_only_at(record) for record in records if record is not None]
    if any(one != only[0] for one in only):
        raise BundleError(
            f"A tensor must belong to one stage of a pipeline, got {key[1]}/{key[2]} at "
            f"{sorted({str(one) for one in only})}. Name layers as in the whole model, such as "
            "torch.nn.ModuleDict with their numbers as keys, or give rename=."
        )


def _holders(record: dict[str, Any], mesh: Mesh) -> list[int]:
    """The ranks that must have the record."""
    only = _only_at(record)
    return [
        rank
        for rank in range(mesh.size)
        if all(mesh.coordinates(rank).get(axis) == at for axis, at in only.items())
    ]


def _without(mesh: Mesh, axes: dict[str, int]) -> Mesh:
    return Mesh({axis: degree for axis, degree in mesh.axes.items() if axis not in axes})


def _nearest(errors: list[float]) -> int:
    """The reading that is clearly the nearest, else the first one."""
    best = min(range(len(errors)), key=lambda i: errors[i])
    others = [error for i, error in enumerate(errors) if i != best]
    return best if errors[best] < _CLEARLY * min(others) else 0


def _error(whole: torch.Tensor, local: list[torch.Tensor], layout: Layout, mesh: Mesh) -> float:
    """The sum of squared differences of all ranks' parts, or of their sums, from the reference."""
    boxes, added = layout
    total = 0.0
    sums = torch.zeros_like(whole)
    seen: set[tuple[int, ...]] = set()  # ranks that differ in other axes hold copies of a summand
    for rank, (tensor, parts) in enumerate(zip(local, boxes, strict=True)):
        for box in parts:
            at = _slices(box["global_offset"], box["size"])
            theirs = tensor[_slices(box["local_offset"], box["size"])]
            if not added:
                total += _distance(whole[at], theirs)
                continue
            at_axes = (mesh.coordinates(rank)[axis] for axis in added)
            summand = (*at_axes, *box["global_offset"], *box["size"])
            if summand not in seen:
                seen.add(summand)
                sums[at] += theirs
    if added:
        total = _distance(whole, sums) * len(local)
    return total if math.isfinite(total) else math.inf


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The sum of squared differences. Equal infinities, as masks have them, differ by nothing."""
    differ = (a != b) & ~(a.isnan() & b.isnan())
    return float((a - b)[differ].square().sum())


def _slices(offset: list[int], size: list[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))


def _boxes_of(
    reading: Reading,
    shapes: list[list[int]],
    whole: list[int],
    mesh: Mesh,
    orders: list[list[int]] | None,
) -> list[list[Box]]:
    data = {axis for axis, degree in mesh.axes.items() if axis in DATA_AXES and degree > 1}
    dims = [dim for dim, axes in reading.axes.items() if data and set(axes) == data]
    result = []
    for rank, (shape, offset) in enumerate(zip(shapes, reading.offsets, strict=True)):
        order = orders[rank] if orders is not None and dims else None
        result.append(_boxes(shape, offset, whole, order, dims[0] if dims else 0))
    return result


def _head_and_tail(
    reading: Reading,
    shapes: list[list[int]],
    whole: list[int],
    boxes: list[list[Box]],
    kind: str,
) -> list[list[Box]] | None:
    """The same boxes where the positions that cp cuts are balanced; None where it cuts none.

    Rank r of cp has the parts r and 2 cp - 1 - r of 2 cp equal ones.
    """
    dims = [dim for dim, axes in reading.axes.items() if axes == ["cp"]]
    if kind not in _SAMPLE_KINDS or len(dims) != 1:
        return None
    dim = dims[0]
    size = shapes[0][dim]
    if size % 2 != 0 or any(shape[dim] != size for shape in shapes):
        return None
    half = size // 2

    def part(box: Box, local: int, begin: int) -> Box:
        moved = {name: list(value) for name, value in box.items()}
        moved["local_offset"][dim], moved["global_offset"][dim] = local, begin
        moved["size"][dim] = half
        return moved

    result = []
    for offset, own in zip(reading.offsets, boxes, strict=True):
        index = offset[dim] // size
        begins = (index * half, whole[dim] - (index + 1) * half)
        result.append([part(box, i * half, begin) for box in own for i, begin in enumerate(begins)])
    return result


def _boxes(
    shape: list[int], offset: list[int], whole: list[int], order: list[int] | None, dim: int
) -> list[Box]:
    """One box, or where samples lie in another order along `dim`, one for each run of them."""
    if math.prod(shape) == 0:
        return []
    zeros = [0] * len(shape)
    if not order or shape[dim] == whole[dim] or shape[dim] % len(order) != 0:
        return [{"local_offset": zeros, "global_offset": offset, "size": shape}]

    def at(values: list[int], value: int) -> list[int]:
        return [*values[:dim], value, *values[dim + 1 :]]

    return [
        {
            "local_offset": at(zeros, local),
            "global_offset": at(offset, begin),
            "size": at(shape, count),
        }
        for local, begin, count in runs_of(order, shape[dim] // len(order))
    ]


def readings_of(shapes: list[list[int]], whole: list[int], mesh: Mesh, kind: str) -> list[Reading]:
    """All ways to cut the whole into parts of these shapes, the likeliest by convention first."""
    found: list[Reading] = [Reading([[0] * len(whole) for _ in shapes], {})]
    for dim, size in enumerate(whole):
        sizes = [shape[dim] for shape in shapes]
        if all(s == size for s in sizes):
            continue
        fitting = [
            (axes, begins)
            for axes in _choices(mesh, kind, dim)
            if (begins := _offsets_along(sizes, size, mesh, axes)) is not None
        ]
        shared = _shared_along(sizes, size, mesh)
        longer = []
        for reading in found:
            used = {axis for axes in reading.axes.values() for axis in axes}
            for axes, begins in fitting:
                if used & set(axes):
                    continue
                offsets = _with(reading.offsets, dim, begins)
                longer.append(Reading(offsets, {**reading.axes, dim: axes}, reading.shared))
            for axis, begins in shared:
                if axis in used or reading.shared is not None:
                    continue
                offsets = _with(reading.offsets, dim, begins)
                longer.append(Reading(offsets, {**reading.axes, dim: [axis]}, axis))
        found = longer
    distinct: list[Reading] = []
    for reading in found:
        if all(reading.offsets != other.offsets for other in distinct):
            distinct.append(reading)
    return distinct


def _with(offsets: list[list[int]], dim: int, begins: list[int]) -> list[list[int]]:
    return [
        [*offset[:dim], begin, *offset[dim + 1 :]]
        for offset, begin in zip(offsets, begins, strict=True)
    ]


def _shared_along(sizes: list[int], whole: int, mesh: Mesh) -> list[tuple[str, list[int]]]:
    """Axes with more ranks than equal parts: as many neighbours hold each part, or take turns."""
    size = sizes[0]
    if size == 0 or whole % size != 0 or any(s != size for s in sizes):
        return []
    parts, found = whole // size, []
    for axis, degree in mesh.axes.items():
        if axis in DATA_AXES or parts >= degree or degree % parts != 0:
            continue
        at = [mesh.coordinates(rank)[axis] for rank in range(mesh.size)]
        found.append((axis, [i // (degree // parts) * size for i in at]))
        found.append((axis, [i % parts * size for i in at]))
    return found


def _choices(mesh: Mesh, kind: str, dim: int) -> list[list[str]]:
    """Sets of axes that may cut a dim, the likeliest first."""
    axes = [axis for axis, degree in mesh.axes.items() if degree > 1]
    data = [axis for axis in axes if axis in DATA_AXES]
    others = [axis for axis in axes if axis not in DATA_AXES]
    order = data + others if kind in _SAMPLE_KINDS and dim == 0 else others + data
    choices = [[axis] for axis in order]
    if len(data) > 1:
        choices.insert(0 if order == data + others else len(choices), data)
    for count in range(2, len(axes) + 1):
        more = [list(chosen) for chosen in itertools.combinations(axes, count)]
        choices += [chosen for chosen in more if chosen not in choices]
    return choices


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
