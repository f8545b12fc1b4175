# SPDX-License-Identifier: Apache-2.0
"""responses.json: how far a reference moves when its weights move by one ulp.

Rules as docs/bundle.md, section 4. To be replaced by `isoshard-judge respond`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import _bundle
from ._bundle import Key

_WIDE = {torch.float32, torch.float64}
_MARGIN = {torch.float64: 2.0**31, torch.float32: 2.0**10}
_K = 3.0
_LANES = 8
_NAMES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def write_responses(reference: Path, perturbed: Sequence[Path]) -> None:
    """Writes responses.json into a reference of one process, and seals it anew."""
    judging = _bundle.read_manifest(reference)["settings"].get("judging", {})
    tensors = _load(reference)
    coarsest = _NAMES.get(judging.get("coarsest_dtype", ""), _coarsest(tensors))
    masked = bool(judging.get("mask_small_gradients", False))
    responses: dict[Key, dict[str, float]] = {}
    for path in perturbed:
        _add(responses, tensors, _load(path), coarsest, masked)
    content = {
        "schema": _bundle.SCHEMA,
        "runs": len(perturbed),
        "responses": [_entry(key, values) for key, values in sorted(responses.items())],
    }
    (reference / _bundle.RESPONSES).write_text(json.dumps(content))
    _bundle.reseal(reference)


def _load(path: Path) -> dict[Key, torch.Tensor]:
    return {key: tensor for key, _, tensor in _bundle.entries_of(path)}


def _coarsest(tensors: dict[Key, torch.Tensor]) -> torch.dtype:
    order = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    found = [order.index(t.dtype) for t in tensors.values() if t.dtype in order]
    return order[max(found, default=1)]


def _add(
    responses: dict[Key, dict[str, float]],
    reference: dict[Key, torch.Tensor],
    run: dict[Key, torch.Tensor],
    coarsest: torch.dtype,
    masked: bool,
) -> None:
    moves = {
        key: (run[key].double() - reference[key].double()).abs().max().item()
        for key in run
        if key[1] == "grad" and key[3] == 0 and key in reference and run[key].numel() > 0
    }
    for key, tensor in run.items():
        if key not in reference or not reference[key].is_floating_point():
            continue
        a, b = reference[key].double().reshape(-1), tensor.double().reshape(-1)
        stepped = _stepped_parameter(key) if masked else None
        if stepped is not None:
            chosen = _compared(reference, key[0], stepped, moves, coarsest)
            if chosen is not None:
                a, b = a[chosen], b[chosen]
        _merge(responses.setdefault(key, {}), a, b)


def _stepped_parameter(key: Key) -> str | None:
    """The parameter whose step a record shows, if it shows one."""
    step, kind, name, call = key
    if kind == "param" and (step > 0 or call > 0):
        return name
    if kind == "optimizer" and name.endswith(".master"):
        return name.removesuffix(".master")
    return None


def _compared(
    reference: dict[Key, torch.Tensor],
    last_step: int,
    parameter: str,
    moves: dict[Key, float],
    coarsest: torch.dtype,
) -> torch.Tensor | None:
    """Elements whose gradient is above its own movement in every step so far."""
    allowed = _K * (math.sqrt((1 + _LANES) / 2) if coarsest in _WIDE else 1.0)
    chosen: torch.Tensor | None = None
    for step in range(last_step + 1):
        key = (step, "grad", parameter, 0)
        if key not in reference:
            continue
        threshold = allowed * _MARGIN.get(coarsest, 1.0) * moves.get(key, 0.0)
        above = reference[key].double().abs().reshape(-1) > threshold
        chosen = above if chosen is None else chosen & above
    return chosen


def _merge(values: dict[str, float], a: torch.Tensor, b: torch.Tensor) -> None:
    norm, moved = _norm(a), _norm(b - a)
    relative = moved / norm if norm > 0 else 0.0
    scale = abs(float(a.dot(b - a)) / float(a.dot(a))) if norm > 0 else 0.0
    new = {
        "relative_error": relative if math.isfinite(relative) else 0.0,
        "scale_error": min(scale, relative) if math.isfinite(scale) else 0.0,
        "absolute_norm": moved,
        "max_abs": min(float((b - a).abs().max()), moved) if a.numel() else 0.0,
        "reference_norm": norm,
        "reference_max_abs": float(a.abs().max()) if a.numel() else 0.0,
    }
    for name, value in new.items():
        values[name] = max(values.get(name, 0.0), value)
    values["runs"] = values.get("runs", 0) + 1


def _norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x)) if x.numel() else 0.0


def _entry(key: Key, values: dict[str, float]) -> dict[str, Any]:
    step, kind, name, call = key
    numbers: dict[str, Any] = {
        field: value if field == "runs" else value.hex() for field, value in values.items()
    }
    return {"step": step, "kind": kind, "name": name, "call": call, **numbers}
