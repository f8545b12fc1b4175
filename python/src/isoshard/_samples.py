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
from ._mesh import DATA_AXES, Mesh
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
    """The same of the reference's inputs and those of each rank."""
    for is_head_tail in (False, True) if mesh.axes.get("cp", 1) > 1 else (False,):
        whole = [_joined(inputs, rank, wanted, mesh, is_head_tail) for rank in range(mesh.size)]
        samples = _samples_of(wanted, whole, mesh)
        if samples is not None:
            return Order(samples, is_head_tail)
    return None


def _samples_of(wanted: Inputs, inputs: list[Inputs], mesh: Mesh) -> list[list[int]] | None:
    reference = _rows(wanted)
    orders: dict[tuple[int, ...], list[int]] = {}
    places: dict[bytes, list[int]] = {}
    for i, row in enumerate(reference):
        places.setdefault(row, []).append(i)
    shares: list[tuple[int, ...]] = []
    rows_of: dict[tuple[int, ...], Rows] = {}
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        share = tuple(c for axis, c in coordinates.items() if axis in DATA_AXES)
        shares.append(share)
        if not inputs[rank]:
            continue  # a later stage of a pipeline has the samples of the first one
        rows = _rows(inputs[rank])
        if share not in orders:
            order = _take(rows, places)
            if order is None:
                return None
            orders[share], rows_of[share] = order, rows
        elif rows != rows_of[share]:
            return None
    taken = sum(len(order) for order in orders.values())
    if taken != len(reference) or any(share not in orders for share in shares):
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
