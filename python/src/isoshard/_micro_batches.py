# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of a step as one record.

A run may split a step's samples into other micro-batches than its reference does: the records are
the same where the samples of all micro-batches stand along dim 0.
"""

from __future__ import annotations

import torch

from ._bundle import Entry
from ._safetensors import dtype_name

#: kind, name, call
Call = tuple[str, str, int]


def merged(entries: list[Entry]) -> list[Entry]:
    """Joins the micro-batches of records along dim 0, where their other dims allow it.

    An activation that does not depend on the samples becomes one record, and so does its
    gradient, the sum over the micro-batches. Micro-batches that cannot be joined become calls of
    their own, behind all others.
    """
    groups: dict[Call, list[Entry]] = {}
    calls: dict[tuple[str, str], int] = {}  # the next free one
    for entry in entries:
        record = entry.record
        what = (record["kind"], record["name"])
        calls[what] = max(calls.get(what, 0), record["call"] + 1)
        groups.setdefault((record["kind"], record["name"], record["call"]), []).append(entry)
    result = []
    free = _sample_free(groups)
    for (kind, name, call), group in groups.items():
        if len(group) == 1 or (name, call) in free and kind == "activation":
            result.append(group[0])
        elif (name, call) in free and kind == "activation_grad" and _may_join(group):
            result.append(_added(group))
        elif _may_join(group):
            result.append(_joined(group))
        else:
            group = sorted(group, key=lambda e: e.micro or 0)
            result.append(group[0])
            what = (group[0].record["kind"], group[0].record["name"])
            for entry in group[1:]:
                entry.record["call"] = calls[what]
                calls[what] += 1
                result.append(entry)
    return _in_order_of_calls(result)


def passes_of(entries: list[Entry]) -> dict[str, list[tuple[int, int]]]:
    """Micro-batch and rows of each input's forward passes, for whoever needs them apart again."""
    found: dict[str, list[tuple[int, int]]] = {}
    for entry in entries:
        if entry.record["kind"] == "data_id" and entry.micro is not None and entry.tensor.ndim:
            place = (entry.micro, entry.tensor.shape[0])
            found.setdefault(entry.record["name"], []).append(place)
    return {name: sorted(places) for name, places in found.items()}


def _sample_free(groups: dict[Call, list[Entry]]) -> set[tuple[str, int]]:
    """Names and calls of activations that are the same in all micro-batches.

    Such as embeddings of positions without a batch dim. Micro-batches that read the same inputs
    say nothing, and no more do zeros, such as the outputs of new adapters, and tensors with a row
    or several for each sample.
    """
    inputs = [group for (kind, _, _), group in groups.items() if kind == "data_id"]
    if not any(_differ(group) for group in inputs):
        return set()
    shapes = [entry.tensor.shape for group in inputs for entry in group]
    samples = {int(shape[0]) for shape in shapes} - {1}
    lengths = {int(shape[1]) for shape in shapes if len(shape) > 1} - samples
    return {
        (name, call)
        for (kind, name, call), group in groups.items()
        if kind == "activation"
        and len(group) > 1
        and _may_join(group)
        and not _has_samples(group[0].tensor.shape, samples, lengths)
        and not _differ(group)
        and bool(group[0].tensor.any())
    }


def _has_samples(shape: torch.Size, samples: set[int], lengths: set[int]) -> bool:
    rows = shape[0]
    has_rows = rows not in lengths and any(rows % number == 0 for number in samples)
    return has_rows or not samples.isdisjoint(shape[:2])


def _differ(group: list[Entry]) -> bool:
    return any(not torch.equal(entry.tensor, group[0].tensor) for entry in group[1:])


def _added(group: list[Entry]) -> Entry:
    """The sum over micro-batches, in at least fp32: roundings of a sum would be the recorder's."""
    total = torch.stack([entry.tensor.double() for entry in group]).sum(0)
    dtype = group[0].tensor.dtype
    own = dtype if dtype.itemsize > 2 else torch.float32
    record = {**group[0].record, "dtype": dtype_name(own, group[0].tensor_name)}
    return Entry(record, total.to(own))


def _in_order_of_calls(entries: list[Entry]) -> list[Entry]:
    """Backward meets the calls of a module in reverse: each tensor's calls in ascending order."""
    places: dict[tuple[str, str], list[int]] = {}
    for i, entry in enumerate(entries):
        places.setdefault((entry.record["kind"], entry.record["name"]), []).append(i)
    result = list(entries)
    for at in places.values():
        in_order = sorted((entries[i] for i in at), key=_call_of)
        for number, (i, entry) in enumerate(zip(at, in_order, strict=True)):
            result[i] = entry
            if entry.record["kind"] == "activation_grad":
                entry.record["call"] = number  # an output that is not used has no gradient
    return result


def _call_of(entry: Entry) -> int:
    return int(entry.record["call"])


def _may_join(group: list[Entry]) -> bool:
    first = group[0]
    return all(
        e.micro is not None
        and e.tensor.ndim > 0
        and e.tensor.shape[1:] == first.tensor.shape[1:]
        and e.tensor.dtype == first.tensor.dtype
        and "boxes" not in e.record
        for e in group
    )


def _joined(group: list[Entry]) -> Entry:
    group = sorted(group, key=lambda e: e.micro or 0)
    record = dict(group[0].record)
    tensor = torch.cat([e.tensor for e in group])
    record["local_shape"] = list(tensor.shape)
    if "global_shape" in record:
        rows = sum(e.record["global_shape"][0] for e in group)
        record["global_shape"] = [rows, *record["global_shape"][1:]]
    return Entry(record, tensor)
