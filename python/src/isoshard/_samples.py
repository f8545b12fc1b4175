# SPDX-License-Identifier: Apache-2.0
"""Which samples of the reference's step each rank had, found by the inputs themselves.

A sampler that deals samples out in turns, or micro-batches that are cut after the ranks' shares,
put them in another order than the reference has. The mean over a batch does not depend on it.
With context parallelism a rank has a part of each sample's positions; load balancing gives rank r
the parts r and 2 cp - 1 - r of 2 cp equal ones (head and tail).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from . import _bundle
from ._mesh import Mesh
from ._safetensors import bytes_of

Rows = list[bytes]
Inputs = dict[str, torch.Tensor]


@dataclass
class Order:
    """For each rank the reference's number of each of its samples; how positions are cut."""

    samples: list[list[int]]
    is_head_tail: bool = False


def orders_of(reference: Path, run: Path, step: int, mesh: Mesh) -> Order | None:
    """Which samples the ranks had; None if they do not match.

    Every sample of the reference must be had by exactly one data-parallel rank.
    """
    wanted = _inputs(reference, step, 0)
    if not wanted:
        return None
    return order_of_inputs(wanted, [_inputs(run, step, rank) for rank in range(mesh.size)], mesh)


def order_of_inputs(wanted: Inputs, inputs: list[Inputs], mesh: Mesh) -> Order | None:
    """The same of the reference's inputs and those of each rank.

    All inputs together say which sample a row is. Where they do not match, one input alone may, and
    then the others are wrong. Where that does not match either, some samples are not the
    reference's: if half of them are, the others take the places that are left.
    """
    names = [[*wanted], *([name] for name in wanted)]
    for may_differ in (False, True):
        for chosen in names if len(wanted) > 1 else names[:1]:
            order = _order_of(wanted, inputs, mesh, chosen, may_differ)
            if order is not None:
                return order
    return None


def _order_of(
    wanted: Inputs, inputs: list[Inputs], mesh: Mesh, names: list[str], may_differ: bool
) -> Order | None:
    is_alone = len(names) < len(wanted)
    kept = {name: wanted[name] for name in names}
    own = [{n: t for n, t in one.items() if n in names or not is_alone} for one in inputs]
    for is_head_tail in (False, True) if mesh.axes.get("cp", 1) > 1 else (False,):
        whole = [_joined(own, rank, wanted, mesh, is_head_tail) for rank in range(mesh.size)]
        samples = _samples_of(kept, whole, mesh, must_be_unique=is_alone, may_differ=may_differ)
        if samples is not None:
            return Order(samples, is_head_tail)
    return None


def _samples_of(
    wanted: Inputs,
    inputs: list[Inputs],
    mesh: Mesh,
    *,
    must_be_unique: bool = False,
    may_differ: bool = False,
) -> list[list[int]] | None:
    reference = _rows(wanted)
    places: dict[bytes, list[int]] = {}
    for i, row in enumerate(reference):
        places.setdefault(row, []).append(i)
    if must_be_unique and len(places) < len(reference):
        return None
    shares: list[tuple[int, ...]] = []
    rows_of: dict[tuple[int, ...], Rows] = {}
    for rank in range(mesh.size):
        shares.append(mesh.share(rank))
        if not inputs[rank]:
            continue  # a later stage of a pipeline has the samples of the first one
        rows = _rows(inputs[rank])
        if rows_of.setdefault(shares[rank], rows) != rows:
            return None
    has_all = sum(map(len, rows_of.values())) == len(reference) and rows_of.keys() == {*shares}
    if not has_all:
        return None
    taken = {share: _taken(rows, places) for share, rows in rows_of.items()}
    found = sum(place is not None for of_share in taken.values() for place in of_share)
    if found < len(reference) and (not may_differ or 2 * found < len(reference)):
        return None
    free = iter(sorted(place for left in places.values() for place in left))
    orders = {
        share: [next(free) if place is None else place for place in of_share]
        for share, of_share in taken.items()
    }
    return [orders[share] for share in shares]


def _taken(rows: Rows, places: dict[bytes, list[int]]) -> list[int | None]:
    """Takes the place of each row; None for a row that has none left."""
    return [places[row].pop(0) if places.get(row) else None for row in rows]


def _inputs(directory: Path, step: int, rank: int) -> Inputs:
    tensors = _bundle.read_some_tensors(directory, step, rank, "data_id/")
    inputs = {
        r["name"]: tensors[f"data_id/{r['name']}/0"]
        for r in _bundle.read_records(directory, step, rank)["records"]
        if r["kind"] == "data_id" and r["call"] == 0
    }
    return {name: tensor for name, tensor in inputs.items() if tensor.ndim > 0}


def _joined(
    inputs: list[Inputs], rank: int, wanted: Inputs, mesh: Mesh, is_head_tail: bool
) -> Inputs:
    """A rank's inputs, of all positions where dim 1 is cut over the axis cp."""
    degree = mesh.axes.get("cp", 1)
    group = [inputs[other] for other in mesh.line(rank, "cp")] if degree > 1 else []
    result = {}
    for name, own in inputs[rank].items():
        parts = [other[name] for other in group if name in other]
        whole = wanted.get(name)
        is_cut = (
            len(parts) == degree > 1
            and whole is not None
            and whole.ndim == own.ndim > 1
            and all(part.shape == own.shape for part in parts)
            and own.shape[1] * degree == whole.shape[1]
        )
        if is_cut and is_head_tail and own.shape[1] % 2 == 0:
            halves = [part.chunk(2, 1) for part in parts]
            parts = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
        result[name] = torch.cat(parts, 1) if is_cut else own
    return result


def _rows(inputs: Inputs) -> Rows:
    """The bytes of each sample over all inputs that have as many rows as the first one."""
    count = next(iter(inputs.values())).shape[0]
    used = [t for t in inputs.values() if t.shape[0] == count]
    return [b"".join(bytes_of(t[i]) for t in used) for i in range(count)]


def runs_of(order: list[int], block: int) -> list[tuple[int, int, int]]:
    """(local begin, global begin, length) of runs of rows, where a sample has `block` rows."""
    runs: list[tuple[int, int, int]] = []
    for local, sample in enumerate(order):
        begin, wanted = local * block, sample * block
        if runs and runs[-1][0] + runs[-1][2] == begin and runs[-1][1] + runs[-1][2] == wanted:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + block)
        else:
            runs.append((begin, wanted, block))
    return runs
