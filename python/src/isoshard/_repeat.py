# SPDX-License-Identifier: Apache-2.0
"""Checks that two runs of the reference have the same bits: its noise must not widen tolerances."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from . import _bundle
from ._bundle import Key
from .errors import RunError

#: Kinds whose first difference is in what a run begins with.
_STARTS = ("data_id", "mask")


def require_repeat(reference: Path, repeat: Path) -> None:
    """Raises if a second run of the reference, with the same weights, has other bits."""
    steps = [_bundle.read_manifest(bundle)["steps"] for bundle in (reference, repeat)]
    if steps[0] != steps[1]:
        raise RunError(
            f"The reference must repeat bit by bit, got {len(steps[0])} recorded steps and then "
            f"{len(steps[1])}. Let the script make the same steps each time."
        )
    for step in steps[0]:
        if filecmp.cmp(_file_of(reference, step), _file_of(repeat, step), shallow=False):
            continue
        different = list(_differences(reference, repeat, step))
        if different:
            raise RunError(_sentence(different, step))


def _file_of(bundle: Path, step: int) -> Path:
    return _bundle.step_folder(bundle, step) / f"{_bundle.rank_stem(0)}.safetensors"


def _differences(reference: Path, repeat: Path, step: int) -> Iterator[tuple[Key, float]]:
    """The records of other bits, in the order of recording, with their relative difference."""
    first, second = (_bundle.read_tensors(bundle, step, 0) for bundle in (reference, repeat))
    records = {
        _name_of(record): record
        for bundle in (reference, repeat)
        for record in _bundle.read_records(bundle, step, 0)["records"]
    }
    for name, record in records.items():
        key = (step, record["kind"], record["name"], record["call"])
        if name not in first or name not in second:
            yield key, 1.0
        elif not _same_bits(first[name], second[name]):
            yield key, _distance(first[name], second[name])


def _name_of(record: Mapping[str, Any]) -> str:
    return f"{record['kind']}/{record['name']}/{record['call']}"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference over the largest element."""
    if a.shape != b.shape or a.numel() == 0:
        return 1.0
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-300))


def _sentence(different: list[tuple[Key, float]], step: int) -> str:
    (_, kind, name, call), distance = different[0]
    more = f" and {len(different) - 1} more records of this step" if len(different) > 1 else ""
    if kind in _STARTS:
        remedy = "Seed the order and the choice of its samples"
    elif kind == "param" and step == call == 0:
        remedy = "Seed what it draws before it builds the model (torch.manual_seed)"
    else:
        remedy = (
            "Let it compute alike each time (seeds; torch.use_deterministic_algorithms(True) names "
            "operations that do not)"
        )
    return (
        f"The reference must repeat bit by bit, got another {kind} {name} in step {step}{more} "
        f"when the same process ran again (it differs by {distance:.1e} of its largest element). "
        f"{remedy}: such noise would hide errors of its size."
    )
