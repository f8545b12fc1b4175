# SPDX-License-Identifier: Apache-2.0
"""Differences of two right runs that no tolerance is for, taken out of a run before it is judged.

Inputs of floating point may be computed: by a frozen encoder in front of the model, whose last bits
depend on how many samples it gets at a time. A parameter that no output depends on has no gradient
and no optimizer state, or zeros, as the framework likes. Ranks that step some parameters each, and
send them to the others, have the states of these alone. All of this is told.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import _bundle, _safetensors

#: Roundings by which an element of an input of 32 or 64 bits may differ, and of 16. Their size is
#: that of the element, or the median size in its row.
_ROUNDINGS, _COARSE_ROUNDINGS = 64, 2
_MOST_PAIRS = 1 << 24
_NORM = "scalar/grad_norm/0"


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

    def leave_out(self, keys: Collection[str]) -> None:
        """Leaves these records out."""
        self.is_changed = True
        records = self.content["records"]
        self.content["records"] = [r for r in records if _name_of(r) not in keys]

    def add(self, other: _Rank, records: Iterable[dict[str, Any]]) -> None:
        """Adds records of another rank, which has the whole tensors."""
        self.is_changed = True
        for record in records:
            tensor = other.tensor(record)
            assert tensor is not None
            self.content["records"].append(record)
            self.changed[_name_of(record)] = tensor

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


def settle(reference: Path, run: Path) -> list[str]:
    """Takes such differences out of a run in place; a sentence for each kind of them."""
    with _bundle.checked(run):
        manifest = _bundle.read_manifest(run)
        if "compared_with" in manifest:
            return []  # ranks have compared their tensors already
        size = 1
        for axis in manifest["mesh"]:
            size *= int(axis["degree"])
        trusted = _bundle.read_manifest(reference)
        # Else its rank 0 has parts.
        is_whole = all(int(axis["degree"]) == 1 for axis in trusted["mesh"])
        known = trusted["steps"]
        steps = [step for step in manifest["steps"] if step in known]
        near: dict[str, float] = {}
        idle: dict[str, None] = {}  # gradients that are zeros in the run alone
        missing: dict[str, None] = {}  # and in the reference alone
        shared: dict[str, None] = {}
        is_changed = False
        for step in steps:
            wanted, *ranks = (
                _Rank(bundle, step, rank, _bundle.read_records(bundle, step, rank))
                for bundle, rank in [(reference, 0), *((run, rank) for rank in range(size))]
            )
            _settle_inputs(wanted, ranks, near)
            _settle_clipped(wanted, ranks)
            if is_whole:
                in_run, in_reference = _settle_idle(wanted, ranks)
                idle.update(dict.fromkeys(in_run))
                missing.update(dict.fromkeys(in_reference))
                shared.update(dict.fromkeys(_settle_shared(wanted, ranks)))
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
    if shared:
        told.append(
            f"The optimizer states of {len(shared)} parameters were compared on the ranks that "
            f"have them, the first of them {next(iter(shared))}: ranks step some parameters each."
        )
    for names, having, lacking in ((idle, "run", "reference"), (missing, "reference", "run")):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            told.append(
                f"Gradients or optimizer states of these parameters are zeros in the {having} and "
                f"missing in the {lacking}, which is taken as equal: "
                f"{', '.join(list(names)[:4])}{more}."
            )
    return told


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

_Records = dict[str, dict[str, Any]]  # by KIND/NAME/CALL


def _settle_clipped(wanted: _Rank, ranks: Sequence[_Rank]) -> None:
    """Adds the gradients that the optimizer reads on ranks that have clipped none.

    They are recorded only where they were clipped. Elsewhere they are the gradients themselves, but
    for a factor that the rank knows no norm of: it clips if the reference does.
    The number that ranks clip by is no norm if it is none in the reference.
    """
    if not _has(wanted, _NORM):
        for rank in ranks:
            if rank.content.get("own_norm"):
                rank.leave_out([_NORM])
    having = [rank for rank in (wanted, *ranks) if any(map(_is_clipped, rank.content["records"]))]
    for rank in ranks if having else ():
        if rank in having:
            continue
        gradients = [record for record in rank.content["records"] if record["kind"] == "grad"]
        known = wanted.content.get("scaled", {})  # they complete gradients there
        scaled = {n: f for n, f in rank.content.get("scaled", {}).items() if n not in known}
        norms = [r for r in wanted.content["records"] if _name_of(r) == _NORM]
        if scaled and not _has(rank, _NORM):
            rank.add(wanted, norms)
        for record in gradients:
            tensor = rank.tensor(record)
            assert tensor is not None
            if record["name"] in scaled:
                rank.changed[_name_of(record)] = tensor / scaled[record["name"]]
            added = {**record, "name": record["name"] + _bundle.CLIPPED}
            rank.content["records"].append(added)
            rank.changed[_name_of(added)] = tensor
            rank.is_changed = True


def _is_clipped(record: dict[str, Any]) -> bool:
    return bool(record["kind"] == "grad" and record["name"].endswith(_bundle.CLIPPED))


def _settle_idle(wanted: _Rank, ranks: Sequence[_Rank]) -> tuple[list[str], list[str]]:
    """Treats an all-zero gradient or state on one side as equal to a missing one on the other.

    Drops the run's zeros and copies the reference's into the run. Returns the parameters' names
    for each case. A parameter must be recorded after the step: it is compared, so it must not have
    moved.
    """
    own, theirs = _of_parameters(wanted), [_of_parameters(rank) for rank in ranks]
    has_gradients = any(_has_gradient(found.values()) for found in theirs)
    in_run, in_reference = [], []
    for name in {r["name"]: None for r in wanted.content["records"] if r["kind"] == "param"}:
        having = own.get(name, {})
        of_ranks = [found.get(name, {}) for found in theirs]
        extra = set().union(*of_ranks) - having.keys()
        lacking = having.keys() - set().union(*of_ranks)
        is_extra = bool(extra) and not _has_gradient([having])
        if is_extra and all(map(_are_zeros, ranks, [name] * len(ranks), of_ranks)):
            in_run.append(name)
            for rank in ranks:
                rank.leave_out(extra)
        is_lacking = bool(lacking) and has_gradients and not _has_gradient(of_ranks)
        if is_lacking and _are_zeros(wanted, name, having):
            in_reference.append(name)
            for rank in ranks:
                rank.add(wanted, [having[key] for key in having if key in lacking])
    return in_run, in_reference


def _of_parameters(rank: _Rank) -> dict[str, _Records]:
    """The gradient and the states of each parameter; hyperparameters are none of them."""
    found: dict[str, _Records] = {}
    for record in rank.content["records"]:
        name = record["name"]
        if record["kind"] == "optimizer" and not name.endswith(".hyperparameters"):
            name = name.rpartition(".")[0]
        elif record["kind"] == "grad":
            name = name.removesuffix(_bundle.CLIPPED)
        else:
            continue
        found.setdefault(name, {})[_name_of(record)] = record
    return found


def _has_gradient(of_parameters: Iterable[_Records]) -> bool:
    return any(key.startswith("grad/") for records in of_parameters for key in records)


def _are_zeros(rank: _Rank, parameter: str, records: _Records) -> bool:
    """Whether a parameter's gradient and its states beside numbers are 0 on a rank."""
    shapes = [r["local_shape"] for r in rank.content["records"] if r["name"] == parameter]
    is_one = any(math.prod(shape) == 1 for shape in shapes)
    for record in records.values():
        tensor = rank.tensor(record)
        if tensor is None:
            return False
        is_number = record["kind"] == "optimizer" and tensor.numel() == 1
        is_number &= not is_one or record["name"].endswith(".step")
        if not is_number and bool(tensor.any()):
            return False
    return True


# -- states --------------------------------------------------------------------------------------


def _settle_shared(wanted: _Rank, ranks: Sequence[_Rank]) -> list[str]:
    """Marks whole states that only some ranks have as theirs; the parameters' names.

    A rank that has no state of a parameter must have recorded the parameter after the step: it is
    compared, so the rank must have got it from one that stepped it.
    """
    states = [
        {_name_of(r): r for r in rank.content["records"] if r["kind"] == "optimizer"}
        for rank in ranks
    ]
    found = []
    for record in wanted.content["records"]:
        key, parameter = _name_of(record), record["name"].rpartition(".")[0]
        having = [own[key] for own in states if key in own]
        if record["kind"] != "optimizer" or not having or len(having) == len(ranks):
            continue
        shape = record["local_shape"]
        lacking = [rank for rank, own in zip(ranks, states, strict=True) if key not in own]
        if any(_has_state(own, parameter) for own in states if key not in own):
            continue
        if any(r["local_shape"] != shape or "flat" in r or "boxes" in r for r in having):
            continue
        after = [_name_of(r) for r in wanted.content["records"] if _is_of(r, parameter)][-1:]
        if not all(after and _has(rank, after[0]) for rank in lacking):
            continue
        place = {key: having[0][key] for key in ("kind", "name", "call", "dtype")}
        count = math.prod(shape)
        for own in having:
            for name in ("layout", "placements"):
                own.pop(name, None)
            own["global_shape"] = shape
            own["flat"] = [{"local_begin": 0, "global_begin": 0, "count": count}]
        for rank in lacking:
            nothing = {**place, "local_shape": [0], "global_shape": shape, "flat": []}
            rank.content["records"].append(nothing)
            rank.changed[key] = torch.empty(0, dtype=_safetensors.OF_NAME[place["dtype"]])
        for rank in ranks:
            rank.is_changed = True
        found.append(parameter)
    return found


def _has_state(states: Iterable[str], parameter: str) -> bool:
    names = (key.split("/")[1] for key in states if not key.endswith(".hyperparameters/0"))
    return any(name.rpartition(".")[0] == parameter for name in names)


def _has(rank: _Rank, key: str) -> bool:
    return any(_name_of(record) == key for record in rank.content["records"])


def _is_of(record: dict[str, Any], parameter: str) -> bool:
    """Whether a record has a parameter's values; the last one of a step has them after it."""
    return bool(record["kind"] == "param" and record["name"] == parameter)
