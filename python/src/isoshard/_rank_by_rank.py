# SPDX-License-Identifier: Apache-2.0
"""Puts two runs on the same ranks side by side, so that each rank is judged by itself.

The judge compares a run with whole tensors, and asks where in them the parts of ranks lie. Between
two runs on the same mesh there is a simpler question: does each rank hold what it held in the other
run? So the reference becomes a bundle of one process. A tensor that all its ranks hold alike is one
tensor there; of any other one the ranks' own tensors stand there one behind the other, along dim 0
or flattened. The judged run says that each rank has its own place in that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _bundle
from ._bundle import Entry
from ._mesh import Mesh
from ._safetensors import bytes_of

#: kind, name, call
Name = tuple[str, str, int]
#: What says where a tensor lies. Here the place on the same ranks says it.
_PLACES = ("placements", "boxes", "flat", "layout", "grad_scale", "global_shape")
#: What is said of runs on another mesh than the reference's.
_OF_OTHER_MESHES = ("activation_grad_scale", "partial")


@dataclass
class Step:
    """One step of a recorded run, on all ranks."""

    records: list[dict[Name, dict[str, Any]]]
    tensors: list[dict[str, torch.Tensor]]
    contents: list[dict[str, Any]]

    @staticmethod
    def read(bundle: Path, step: int, world_size: int) -> Step:
        """From the files of a bundle."""
        contents = [_bundle.read_records(bundle, step, rank) for rank in range(world_size)]
        tensors = [_bundle.read_tensors(bundle, step, rank) for rank in range(world_size)]
        records = [{_name_of(r): r for r in content["records"]} for content in contents]
        return Step(records, tensors, contents)

    def tensor(self, rank: int, name: Name) -> torch.Tensor | None:
        """What a rank has recorded, if it has."""
        kind, tensor, call = name
        return self.tensors[rank].get(f"{kind}/{tensor}/{call}")

    def names(self) -> list[Name]:
        """The records of all ranks in the order of recording."""
        return list(dict.fromkeys(name for records in self.records for name in records))


@dataclass(frozen=True)
class _Place:
    """Where the ranks' tensors lie in the reference's; `is_flat`: one flattened tensor in it."""

    shapes: list[tuple[int, ...] | None]  # of each rank; None where it holds nothing
    is_copy: bool

    @property
    def is_flat(self) -> bool:
        """Whether the tensors fit behind each other only where they are flattened."""
        return len({shape[1:] for shape in self._known()}) > 1 or () in self.shapes

    def _known(self) -> list[tuple[int, ...]]:
        return [shape for shape in self.shapes if shape is not None]

    @property
    def global_shape(self) -> list[int]:
        """The shape of the tensor in the reference."""
        first, *_ = self._known()
        if self.is_copy:
            return list(first)
        if self.is_flat:
            return [sum(math.prod(shape) for shape in self._known())]
        return [sum(shape[0] for shape in self._known()), *first[1:]]

    def fields(self, rank: int) -> dict[str, Any]:
        """What the record of a rank says of its place."""
        shape = self.shapes[rank]
        place: dict[str, Any] = {"global_shape": self.global_shape}
        if self.is_copy or shape is None:
            return place
        before = [shape for shape in self.shapes[:rank] if shape is not None]
        if self.is_flat:
            begin, count = sum(math.prod(s) for s in before), math.prod(shape)
            place["flat"] = []
            if count:
                place["flat"] = [{"local_begin": 0, "global_begin": begin, "count": count}]
            return place
        offset = [sum(s[0] for s in before), *(0 for _ in shape[1:])]
        box = {"local_offset": [0] * len(shape), "global_offset": offset, "size": list(shape)}
        place["boxes"] = [box] if math.prod(shape) else []
        return place


def _place_of(step: Step, name: Name) -> _Place:
    tensors = [step.tensor(rank, name) for rank in range(len(step.records))]
    first = tensors[0]
    is_copy = first is not None and all(t is not None and same_bits(first, t) for t in tensors)
    return _Place([None if t is None else tuple(t.shape) for t in tensors], is_copy)


def _joined(step: Step, name: Name, place: _Place) -> torch.Tensor:
    tensors = [step.tensor(rank, name) for rank in range(len(step.records))]
    held = [tensor for tensor in tensors if tensor is not None]
    if place.is_copy:
        return held[0]
    return torch.cat([t.reshape(-1) for t in held] if place.is_flat else held)


def _name_of(record: dict[str, Any]) -> Name:
    return record["kind"], record["name"], record["call"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, NaNs too."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def first_difference(reference: Path, run: Path) -> tuple[int, Name] | None:
    """The step and record at which some rank has other bits than in the reference."""
    for step, wanted, actual in _steps_of_both(reference, run):
        for name in list(dict.fromkeys([*wanted.names(), *actual.names()])):
            for rank in range(len(wanted.records)):
                a, b = wanted.tensor(rank, name), actual.tensor(rank, name)
                if a is None and b is None:
                    continue
                if a is None or b is None or not same_bits(a, b):
                    return step, name
    return None


def _steps_of_both(reference: Path, run: Path) -> Iterator[tuple[int, Step, Step]]:
    size = world_size_of(reference)
    steps = _bundle.read_manifest(run)["steps"]
    for step in _bundle.read_manifest(reference)["steps"]:
        if step in steps:
            yield step, Step.read(reference, step, size), Step.read(run, step, size)


def world_size_of(bundle: Path) -> int:
    """The number of ranks of a run."""
    return Mesh.from_json(_bundle.read_manifest(bundle)["mesh"]).size


def write_whole(reference: Path, run: Path, target: Path) -> None:
    """Writes a run as one process: `run` is `reference`, or a run that lies like it."""
    manifest = _bundle.read_manifest(run)
    _bundle.prepare_folder(target, manifest["run"])
    for step, wanted, actual in _steps_of_both(reference, run):
        entries = []
        for name in actual.names():
            place = _place_of(wanted, name) if name in wanted.names() else None
            own = _place_of(actual, name)
            if place is not None and own.shapes == place.shapes:
                own = place
            record = next(records[name] for records in actual.records if name in records)
            tensor = _joined(actual, name, own)
            shape = list(tensor.shape)
            place_fields = {"global_shape": shape, "local_shape": shape}
            entries.append(Entry({**_without_place(record), **place_fields}, tensor))
        _bundle.write_rank(target, manifest["run"], 0, step, entries)
    _seal(target, reference, manifest, is_one=True)


def write_ranks(reference: Path, run: Path, target: Path) -> None:
    """Writes a run so that each of its ranks has the place that it has in the reference."""
    manifest = _bundle.read_manifest(run)
    _bundle.prepare_folder(target, manifest["run"])
    for step, wanted, actual in _steps_of_both(reference, run):
        known = set(wanted.names())
        places = {name: _place_of(wanted, name) for name in known}
        for rank, records in enumerate(actual.records):
            entries = []
            for name, record in records.items():
                tensor = actual.tensor(rank, name)
                assert tensor is not None
                fields: dict[str, Any] = {"global_shape": list(tensor.shape)}
                if name in known and places[name].shapes[rank] == tuple(tensor.shape):
                    fields = places[name].fields(rank)
                entries.append(Entry({**_without_place(record), **fields}, tensor))
            journal = actual.contents[rank].get("journal")
            _bundle.write_rank(target, manifest["run"], rank, step, entries, journal)
    _seal(target, reference, manifest, is_one=False)


def _without_place(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in _PLACES}


def _seal(target: Path, reference: Path, manifest: dict[str, Any], *, is_one: bool) -> None:
    settings = manifest["settings"]
    judging = {k: v for k, v in settings["judging"].items() if k not in _OF_OTHER_MESHES}
    theirs = _bundle.read_manifest(reference)
    training = {**settings["training"]}
    for part, wanted in theirs["settings"]["training"].items():
        own = training.get(part)
        if part == "optimizer" and own is not None and own.get("kind") == wanted.get("kind"):
            training[part] = wanted  # its numbers are those of the first step, and are judged there
    content = {key: value for key, value in manifest.items() if key != "files"}
    content["settings"] = {**settings, "judging": judging, "training": training}
    content["steps"] = [step for step in manifest["steps"] if step in theirs["steps"]]
    if is_one:
        content["mesh"] = [{**axis, "degree": 1} for axis in manifest["mesh"]]
    _bundle.seal(target, content)
