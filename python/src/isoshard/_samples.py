# SPDX-License-Identifier: Apache-2.0
"""Which samples of the reference's step each rank had, found by the inputs themselves.

A sampler that deals samples out in turns, or micro-batches that are cut after the ranks' shares,
put them in another order than the reference has. The mean over a batch does not depend on it.
"""

from __future__ import annotations

from pathlib import Path

from . import _bundle
from ._mesh import DATA_AXES, Mesh

Rows = list[bytes]


def orders_of(reference: Path, run: Path, step: int, mesh: Mesh) -> list[list[int]] | None:
    """For each rank the reference's number of each of its samples; None if they do not match.

    Every sample of the reference must be had by exactly one data-parallel rank.
    """
    wanted = _rows(reference, step, 0)
    if wanted is None:
        return None
    orders: dict[tuple[int, ...], list[int]] = {}
    places: dict[bytes, list[int]] = {}
    for i, row in enumerate(wanted):
        places.setdefault(row, []).append(i)
    shares: list[tuple[int, ...]] = []
    rows_of: dict[tuple[int, ...], Rows] = {}
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        share = tuple(c for axis, c in coordinates.items() if axis in DATA_AXES)
        shares.append(share)
        rows = _rows(run, step, rank)
        if rows is None:
            continue  # a later stage of a pipeline has the samples of the first one
        if share not in orders:
            order = _take(rows, places)
            if order is None:
                return None
            orders[share], rows_of[share] = order, rows
        elif rows != rows_of[share]:
            return None
    taken = sum(len(order) for order in orders.values())
    if taken != len(wanted) or any(share not in orders for share in shares):
        return None
    return [orders[share] for share in shares]


def _take(rows: Rows, places: dict[bytes, list[int]]) -> list[int] | None:
    order = []
    for row in rows:
        free = places.get(row)
        if not free:
            return None
        order.append(free.pop(0))
    return order


def _rows(directory: Path, step: int, rank: int) -> Rows | None:
    """The bytes of each sample over all inputs that have as many rows as the first one."""
    tensors = _bundle.read_tensors(directory, step, rank)
    inputs = [
        tensors[f"data_id/{r['name']}/0"]
        for r in _bundle.read_records(directory, step, rank)["records"]
        if r["kind"] == "data_id" and r["call"] == 0
    ]
    inputs = [t for t in inputs if t.ndim > 0]
    if not inputs:
        return None
    count = inputs[0].shape[0]
    used = [t for t in inputs if t.shape[0] == count]
    return [b"".join(t[i].contiguous().numpy().tobytes() for t in used) for i in range(count)]


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
