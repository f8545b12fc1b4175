# SPDX-License-Identifier: Apache-2.0
"""Differences of two right runs that no tolerance is for, taken out of a run before it is judged.

Inputs of floating point may be computed: by a frozen encoder in front of the model, whose last bits
depend on how many samples it gets at a time. A parameter that no output depends on has no gradient,
or one of zeros, as the framework likes. Both are told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import _bundle, _safetensors

#: Roundings by which an element of an input of 32 or 64 bits may differ, and of 16. Their size is
#: that of the element, or the median size in its row.
_ROUNDINGS, _COARSE_ROUNDINGS = 64, 2
_MOST_PAIRS = 1 << 24


@dataclass
class Settled:
    """What is to be told, and which records of the reference the run need not have."""

    told: list[str] = field(default_factory=list)
    not_recorded: list[str] = field(default_factory=list)


@dataclass
class _Rank:
    """A rank's files of one step, of which little is read."""

    bundle: Path
    step: int
    rank: int
    content: dict[str, Any]
    changed: dict[str, torch.Tensor] = field(default_factory=dict)
    is_changed: bool = False

    def inputs(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of an input's calls that have samples."""
        found = _bundle.read_some_tensors(self.bundle, self.step, self.rank, f"data_id/{name}/")
        return {key: tensor for key, tensor in found.items() if tensor.ndim > 0}

    def tensor(self, record: dict[str, Any]) -> torch.Tensor | None:
        """What a record has of its tensor."""
        key = _name_of(record)
        return _bundle.read_some_tensors(self.bundle, self.step, self.rank, key).get(key)

    def write(self) -> None:
        """Writes both files anew; the bundle has to be resealed."""
        tensors = {**_bundle.read_tensors(self.bundle, self.step, self.rank), **self.changed}
        names = [_name_of(record) for record in self.content["records"]]
        kept = [(name, tensors[name]) for name in names if name in tensors]
        stem = _bundle.step_folder(self.bundle, self.step) / _bundle.rank_stem(self.rank)
        file = stem.with_suffix(".safetensors")
        file.unlink()
        _safetensors.write_safetensors(file, kept, is_new=True)
        _bundle.write_records(self.bundle, self.step, self.rank, self.content)


def settle(reference: Path, run: Path) -> Settled:
    """Takes such differences out of a run in place."""
    with _bundle.checked(run):
        manifest = _bundle.read_manifest(run)
        if "compared_with" in manifest:
            return Settled()  # ranks have compared their tensors already
        size = 1
        for axis in manifest["mesh"]:
            size *= int(axis["degree"])
        known = _bundle.read_manifest(reference)["steps"]
        steps = [step for step in manifest["steps"] if step in known]
        near: dict[str, float] = {}
        idle: dict[str, None] = {}  # gradients that are zeros in the run alone
        missing: dict[str, None] = {}  # and in the reference alone
        is_changed = False
        for step in steps:
            wanted, *ranks = (
                _Rank(bundle, step, rank, _bundle.read_records(bundle, step, rank))
                for bundle, rank in [(reference, 0), *((run, rank) for rank in range(size))]
            )
            _settle_inputs(wanted, ranks, near)
            idle.update(dict.fromkeys(_settle_gradients(wanted, ranks)))
            missing.update(dict.fromkeys(_without_gradient(wanted, ranks)))
            for rank in ranks:
                if rank.is_changed:
                    rank.write()
                    is_changed = True
        if is_changed:
            _bundle.reseal(run)
    told = [
        f"The input {name} differs from the reference's by roundings (up to {error:.1e} of its "
        "elements). It was computed, and is taken as equal."
        for name, error in near.items()
    ]
    for names, having, lacking in ((idle, "run", "reference"), (missing, "reference", "run")):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            told.append(
                f"These gradients are zeros in the {having} and none in the {lacking}, and are not "
                f"judged: {', '.join(list(names)[:4])}{more}."
            )
    return Settled(told, [f"grad/{name}" for name in missing])


def _name_of(record: dict[str, Any]) -> str:
    return f"{record['kind']}/{record['name']}/{record['call']}"


# -- inputs --------------------------------------------------------------------------------------


def _settle_inputs(wanted: _Rank, ranks: Iterable[_Rank], near: dict[str, float]) -> None:
    names = {
        record["name"]
        for record in wanted.content["records"]
        if record["kind"] == "data_id" and record["dtype"].startswith(("f", "bf"))
    }
    for name in names:
        own = wanted.inputs(name).values()
        for rank in ranks:
            for key, tensor in rank.inputs(name).items():
                alike = [
                    t for t in own if t.shape[1:] == tensor.shape[1:] and t.dtype == tensor.dtype
                ]
                if not alike:
                    continue
                found, error = _nearest(torch.cat(alike), tensor)
                if found is not None:
                    rank.changed[key], rank.is_changed = found, True
                    near[name] = max(near.get(name, 0.0), error)


def _nearest(wanted: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor | None, float]:
    """The tensor made of the nearest rows of the reference, if all are as near as roundings are.

    None if it is made of them already, or has another row.
    """
    rows = tensor.reshape(len(tensor), -1)
    known = wanted.reshape(len(wanted), -1)
    bits = {_safetensors.bytes_of(row.contiguous()) for row in known}
    if all(_safetensors.bytes_of(row.contiguous()) in bits for row in rows):
        return None, 0.0
    if rows.shape[0] * known.shape[0] > _MOST_PAIRS or not rows.shape[1]:
        return None, 0.0
    a, b = rows.double().nan_to_num(), known.double().nan_to_num()
    at = torch.cdist(a, b).argmin(1)
    near = b[at]
    size = torch.maximum(near.abs(), near.abs().median(1, keepdim=True).values)
    error = (a - near).abs()
    eps = torch.finfo(tensor.dtype).eps
    allowed = eps * (_ROUNDINGS if eps < 1e-5 else _COARSE_ROUNDINGS)
    if not bool((error <= allowed * size).all()):
        return None, 0.0
    if not torch.equal(rows.isfinite(), known[at].isfinite()):
        return None, 0.0
    # Roundings are independent: a factor that all elements share is none.
    ordinary = near.abs() < 1e30
    a, near = a[ordinary], near[ordinary]
    scale = float((a * near).sum() / (near * near).sum().clamp_min(1e-300))
    if near.numel() and abs(scale - 1) > 4 * allowed / math.sqrt(near.numel()):
        return None, 0.0
    largest = float((error / size.clamp_min(1e-300)).max())
    return known[at].reshape(tensor.shape).contiguous(), largest


# -- gradients -----------------------------------------------------------------------------------


def _settle_gradients(wanted: _Rank, ranks: Sequence[_Rank]) -> list[str]:
    """Leaves out gradients, and states, of zeros that the reference has none of; their names."""
    known = {_name_of(record) for record in wanted.content["records"]}
    of_parameters = {r["name"] for r in wanted.content["records"] if r["kind"] == "param"}
    extra: dict[str, list[tuple[_Rank, dict[str, Any]]]] = {}
    for rank in ranks:
        for record in rank.content["records"]:
            if record["kind"] == "grad" and _name_of(record) not in known:
                extra.setdefault(record["name"], []).append((rank, record))
    found = []
    for name, places in extra.items():
        if name not in of_parameters or not all(_is_zero(rank, record) for rank, record in places):
            continue
        found.append(name)
        for rank in {id(rank): rank for rank, _ in places}.values():
            rank.is_changed = True
            rank.content["records"] = [
                record
                for record in rank.content["records"]
                if not (_is_of(record, name) and _name_of(record) not in known)
            ]
    return found


def _without_gradient(wanted: _Rank, ranks: Sequence[_Rank]) -> Iterator[str]:
    """Names of gradients of zeros in the reference that no rank has, though others are there."""
    had = {r["name"] for rank in ranks for r in rank.content["records"] if r["kind"] == "grad"}
    for record in wanted.content["records"] if had else []:
        if record["kind"] == "grad" and record["name"] not in had and _is_zero(wanted, record):
            yield record["name"]


def _is_of(record: dict[str, Any], parameter: str) -> bool:
    is_state = record["kind"] == "optimizer" and record["name"].rpartition(".")[0] == parameter
    return is_state or (record["kind"] == "grad" and record["name"] == parameter)


def _is_zero(rank: _Rank, record: dict[str, Any]) -> bool:
    """Whether a gradient, and each state of its parameter beside numbers, is 0 on a rank."""
    for other in rank.content["records"]:
        if not _is_of(other, record["name"]) or other["name"].endswith(".hyperparameters"):
            continue
        tensor = rank.tensor(other)
        if tensor is None or (tensor.numel() > 1 and bool(tensor.any())):
            return False
    return True
