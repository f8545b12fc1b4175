# SPDX-License-Identifier: Apache-2.0
"""keep="what_differs": each rank compares its tensors with the reference while it runs.

What agrees leaves its statistics, a digest and some samples; what differs by more than the
reference's responses allow is kept as a whole, up to a limit. A tensor is compared where it lies
if its place is known: a DTensor, a layout that was given, an activation of the reference's shape,
or a parameter whose place was found before. All others are held until the step has been made. Then
ranks tell each other their shapes, and places are found as _places finds them. What cannot be
placed is kept as a whole, and placed when the run is judged. Ranks meet at no other time: between
two steps a script may let one rank work alone, while the others wait for it.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import _bundle
from ._bundle import CLIPPED, Entry, Key
from ._calls import not_journaled
from ._mesh import DATA_AXES, Mesh
from ._places import Candidates, Layout, apply_layout, candidates_of, shapes_of
from ._ranks_library import RanksLibrary
from ._samples import Inputs, Order, order_of_inputs

#: Bytes of tensors that differ, which a rank keeps: of those compared at once, and of the others.
KEPT_BYTES = 1 << 30
_PLACED_KINDS = ("param", "grad", "optimizer")

Records = list[dict[str, Any] | None]


class WhatDiffers:
    """One rank's comparison. `offer` gets each tensor, `settle` those that it has not placed."""

    def __init__(
        self,
        reference: Path,
        *,
        rank: int,
        mesh: Mesh,
        run: str,
        purpose: str,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.reference, self.rank, self.mesh, self.purpose = reference, rank, mesh, purpose
        self._library = RanksLibrary(
            reference, rank=rank, run=run, mesh=mesh.to_json(), purpose=purpose
        )
        self.compared_with = self._library.compared_with
        self._room = {"at once": kept_bytes, "held": kept_bytes}
        self._places: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
        self._shapes: dict[Key, list[int]] = {}
        self._step = -1

    def has_clipped(self, step: int) -> bool:
        """Whether the reference has clipped gradients in a step."""
        self._begin(step)
        return any(kind == "grad" and name.endswith(CLIPPED) for _, kind, name, _ in self._shapes)

    def close(self) -> None:
        """Lets the reference go."""
        self._library.close()

    def offer(self, record: dict[str, Any], local: torch.Tensor, step: int) -> Entry | None:
        """The entry of a tensor whose place is known; None: it has to be held."""
        self._begin(step)
        if record.get("layout") == "infer":
            place = self._places.get(_place_key(record))
            if place is not None and record["kind"] in _PLACED_KINDS:
                del record["layout"]
                record.update(copy.deepcopy(place))
            elif record["kind"] in ("activation", "activation_grad"):
                self._place_whole(record)
            if record.get("layout") == "infer":
                return None
        return self._compared(record, local, step, "at once")

    def _begin(self, step: int) -> None:
        if step != self._step:
            self._shapes, self._step = shapes_of(self.reference, step), step

    def _compared(self, record: dict[str, Any], local: torch.Tensor, step: int, room: str) -> Entry:
        tensor = local.detach().to("cpu").contiguous()
        result = self._library.compare({**record, "step": step}, tensor)
        if result.pop("keep") and not _is_full(record, self._room[room], tensor):
            if _counts(record):
                self._room[room] -= tensor.nbytes
            kept = tensor.clone() if tensor.data_ptr() == local.data_ptr() else tensor
            return Entry(record, kept, is_settled=True)
        record.update(result)
        record["kept"] = False
        if self.purpose == "response":
            return Entry(record, torch.empty(0), form="none", is_settled=True)
        return Entry(record, self._library.samples(tensor.dtype), form="sample", is_settled=True)

    @not_journaled
    def settle(self, entries: list[Entry], step: int, *, together: bool = False) -> list[Entry]:
        """The entries, compared where their place is known.

        The places of parameters serve their gradients and later steps, too. Ranks: local;
        `together`: collective, and ranks find the other places.
        """
        self._begin(step)
        held = [e for e in entries if not e.is_settled]
        for entry in held:
            self._place_whole(entry.record)
        if together and self.mesh.size > 1:
            self._find_places([e for e in held if e.record.get("layout") == "infer"], entries)
        result = []
        for entry in entries:
            if entry.is_settled:
                result.append(entry)
                continue
            record = entry.record
            if record.get("layout") == "infer":
                entry.is_settled = together
                result.append(entry)
                continue
            if record["kind"] == "param":
                fields = ("global_shape", "boxes", "placements")
                place = {field: record[field] for field in fields if field in record}
                self._places[_place_key(record)] = copy.deepcopy(place)
            result.append(self._compared(record, entry.tensor, step, "held"))
        return result

    # -- places ------------------------------------------------------------------------------

    def _place_whole(self, record: dict[str, Any]) -> None:
        """A tensor of the reference's shape is the whole tensor, so no other rank is asked.

        But the gradient of an activation that no sample decides is a sum over data ranks.
        """
        shape = list(record["local_shape"])
        if record["kind"] == "activation_grad" and self.mesh.data_degree > 1:
            return
        if record.get("layout") == "infer" and self._shapes.get(self._key(record)) == shape:
            zeros = [0] * len(shape)
            box = {"local_offset": zeros, "global_offset": zeros, "size": shape}
            apply_layout(record, shape, ([[box] if math.prod(shape) else []], ()), 0)

    def _find_places(self, held: list[Entry], entries: list[Entry]) -> None:
        """Writes boxes into records whose layout is to be inferred, where one reading is chosen."""
        if not dist.is_initialized():
            return
        mine = {self._key(e.record): e.record for e in held}
        shares = _gathered((mine, self._ids(entries)), self.mesh.size)
        order = self._order([ids for _, ids in shares])
        by_key: dict[Key, Records] = {}
        for rank, (records, _) in enumerate(shares):
            for key, record in records.items():
                by_key.setdefault(key, [None] * self.mesh.size)[rank] = record
        chosen: dict[Key, tuple[Candidates, int]] = {}
        open_: dict[Key, Candidates] = {}
        known: dict[str, Candidates | None] = {}  # layers have the same shapes
        for key, all_of_key in by_key.items():
            whole = self._shapes.get(key)
            if whole is None:
                continue
            alike = _alike(key, all_of_key, whole)
            if alike not in known:
                known[alike] = candidates_of(key, all_of_key, whole, self.mesh, order)
            candidates = known[alike]
            if candidates is None:
                continue
            if len(candidates.layouts) == 1:
                chosen[key] = (candidates, 0)
            elif all(added is None for _, added in candidates.layouts):
                open_[key] = candidates
        errors = self._errors(open_, {self._key(e.record): e for e in held})
        for key, candidates in open_.items():
            chosen[key] = (candidates, candidates.nearest(errors[key]))
        for entry in held:
            key = self._key(entry.record)
            if key in chosen:
                candidates, index = chosen[key]
                at = candidates.ranks.index(self.rank)
                apply_layout(entry.record, candidates.whole, candidates.layouts[index], at)

    def _errors(
        self, open_: dict[Key, Candidates], held: dict[Key, Entry]
    ) -> dict[Key, list[float]]:
        """Of each candidate the squared error over all ranks."""
        mine: dict[Key, list[float]] = {}
        for key, candidates in open_.items():
            entry = held.get(key)
            if entry is None:
                continue
            at = candidates.ranks.index(self.rank)
            layouts, whole = candidates.layouts, candidates.whole
            mine[key] = [self._error(entry, whole, layout, at) for layout in layouts]
        shares: list[dict[Key, list[float]]] = []
        if open_:  # on all ranks or none
            shares = _gathered(mine, self.mesh.size)
        return {
            key: [
                sum(share[key][i] for share in shares if key in share)
                for i in range(len(candidates.layouts))
            ]
            for key, candidates in open_.items()
        }

    def _error(self, entry: Entry, whole: list[int], layout: Layout, at: int) -> float:
        record = copy.deepcopy(entry.record)
        apply_layout(record, whole, layout, at)
        return self._library.error({**record, "step": self._step}, entry.tensor)

    def _key(self, record: dict[str, Any]) -> Key:
        return (self._step, record["kind"], record["name"], record["call"])

    def _needs_order(self) -> bool:
        axes = self.mesh.axes
        return any(n > 1 and (axis in DATA_AXES or axis == "cp") for axis, n in axes.items())

    def _ids(self, entries: list[Entry]) -> Inputs:
        if not self._needs_order():
            return {}
        return {
            e.record["name"]: e.tensor
            for e in entries
            if e.record["kind"] == "data_id" and e.record["call"] == 0 and e.tensor.ndim > 0
        }

    def _order(self, inputs: list[Inputs]) -> Order | None:
        if not any(inputs):
            return None
        tensors = _bundle.read_some_tensors(self.reference, self._step, 0, "data_id/")
        wanted = {
            name.split("/", 1)[1].rpartition("/")[0]: tensor
            for name, tensor in tensors.items()
            if name.endswith("/0") and tensor.ndim > 0
        }
        return order_of_inputs(wanted, inputs, self.mesh) if wanted else None


def _place_key(record: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Gradients and states lie where their parameters do, if they have the same shape."""
    name = record["name"]
    if record["kind"] == "optimizer":
        name = name.rpartition(".")[0]
    return name, tuple(record["local_shape"])


def _alike(key: Key, records: Records, whole: list[int]) -> str:
    """Equal for tensors that have the same candidates."""
    said = [r and (r["local_shape"], r.get("layout"), r.get("placements")) for r in records]
    return f"{key[1]} {whole} {said}"


def _counts(record: dict[str, Any]) -> bool:
    """Whether a kept tensor counts against the limit: what the judge needs anyway does not."""
    return record["kind"] not in ("scalar", "data_id", "mask")


def _is_full(record: dict[str, Any], room: int, tensor: torch.Tensor) -> bool:
    is_needed = any(p["kind"] == "partial" for p in record.get("placements", []))
    return _counts(record) and not is_needed and tensor.numel() > 2048 and tensor.nbytes > room


def _gathered(value: Any, size: int) -> list[Any]:
    result: list[Any] = [None] * size
    dist.all_gather_object(result, value)
    return result
