# SPDX-License-Identifier: Apache-2.0
"""Makes one record of a tensor's micro-batches."""

from __future__ import annotations

import torch

from ._bundle import Entry

Key = tuple[str, str, int]


def merged(entries: list[Entry]) -> list[Entry]:
    """Joins the micro-batches of records along dim 0, where their other dims allow it.

    Micro-batches that cannot be joined become calls of their own, behind all others. What no
    sample decides, such as embeddings of positions, is the same for each of them: it is kept once,
    and the gradients of the micro-batches are added up.
    """
    groups: dict[tuple[str, str, int], list[Entry]] = {}
    calls: dict[tuple[str, str], int] = {}  # the next free one
    for entry in entries:
        record = entry.record
        what = (record["kind"], record["name"])
        calls[what] = max(calls.get(what, 0), record["call"] + 1)
        groups.setdefault((record["kind"], record["name"], record["call"]), []).append(entry)
    result = []
    outside = _without_samples(groups)
    for key, group in groups.items():
        if len(group) > 1 and key in outside and _may_join(group):
            result.append(_once(group))
        elif len(group) == 1:
            result.append(group[0])
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


def _without_samples(groups: dict[Key, list[Entry]]) -> set[Key]:
    """Outputs that are equal, bit by bit, for micro-batches of other samples; their gradients."""
    ids = [g for (kind, _, _), g in groups.items() if kind == "data_id" and len(g) > 1]
    samples = {e.tensor.shape[0] for g in ids[:1] for e in g if e.tensor.ndim > 0}
    if not any(not torch.equal(g[0].tensor, e.tensor) for g in ids for e in g[1:]):
        return set()
    found: set[Key] = set()
    for (kind, name, call), group in groups.items():
        first = group[0].tensor
        if kind == "activation" and first.ndim > 0 and first.numel() > 0 and len(group) > 1:
            has_samples = any(
                e.tensor.shape != first.shape or not torch.equal(e.tensor, first) for e in group
            )
            has_samples = has_samples or any(first.shape[0] % n == 0 for n in samples)
            if not has_samples and bool(first.count_nonzero()):
                found |= {(kind, name, call), ("activation_grad", name, call)}
    return found


def _once(group: list[Entry]) -> Entry:
    """Equal outputs once, or the sum of their gradients."""
    first = group[0]
    if first.record["kind"] == "activation":
        return Entry(first.record, first.tensor)
    total = torch.stack([e.tensor.double() for e in group]).sum(0)
    return Entry(first.record, total.to(first.tensor.dtype))
