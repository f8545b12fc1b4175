# SPDX-License-Identifier: Apache-2.0
"""Compares the buffers that a model begins with, such as tables of rotary frequencies.

Checkpoints do not hold all buffers, so a rank may have others than the single process. A rank may
also have others on purpose. So buffers are named only where a run diverges in its first step.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from . import _bundle
from ._data import Finding
from ._dtensor import is_dtensor
from ._mesh import Mesh
from ._names import named_modules

_MOST_ELEMENTS = 256
#: Relative difference of two buffers that no roundings make.
_CLEARLY = 1e-3


def fingerprints(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Shape, norm and some elements of each plain buffer of floating point, by name.

    Of a large buffer only so many elements are looked at, evenly spread over it.
    """
    found: dict[str, dict[str, Any]] = {}
    for prefix, module in named_modules(model):
        for key, value in module.named_buffers(recurse=False):
            is_plain = value.layout == torch.strided and not value.is_meta and not is_dtensor(value)
            if not is_plain or not value.is_floating_point() or value.numel() == 0:
                continue
            flat = value.detach().reshape(-1)
            flat = flat[:: -(-flat.numel() // _MOST_ELEMENTS)].to("cpu", torch.float64)
            if not bool(flat.isfinite().all()):
                continue  # such as a mask
            found[f"{prefix}.{key}" if prefix else key] = {
                "shape": list(value.shape),
                "norm": float(flat.norm()),
                "elements": flat.tolist(),
            }
    return found


def check_buffers(reference: Path, run: Path) -> list[Finding]:
    """Buffers that have the reference's shape and clearly other values on some ranks."""
    step = _bundle.read_manifest(reference)["steps"][0]
    manifest = _bundle.read_manifest(run)
    if step not in manifest["steps"]:
        return []
    wanted = _bundle.read_records(reference, step, 0).get("buffers", {})
    size = Mesh.from_json(manifest["mesh"]).size
    of_ranks = [_bundle.read_records(run, step, r).get("buffers", {}) for r in range(size)]
    found = []
    for name, buffer in wanted.items():
        others = [rank for rank, own in enumerate(of_ranks) if _differs(own.get(name), buffer)]
        if others:
            norm = of_ranks[others[0]][name]["norm"]
            numbers = {"norm": norm, "reference_norm": buffer["norm"]}
            finding = Finding(
                step,
                name,
                "buffer_differs",
                None,
                others,
                numbers=numbers,
                kind="param",
                only_if_diverging=True,
            )
            found.append(finding)
    return found


def _differs(own: dict[str, Any] | None, wanted: dict[str, Any]) -> bool:
    """Whether by far more than roundings, which may come from other devices."""
    if own is None or own["shape"] != wanted["shape"]:
        return False
    pairs = zip(own["elements"], wanted["elements"], strict=True)
    distance = math.sqrt(sum((a - b) ** 2 for a, b in pairs))
    return bool(distance > _CLEARLY * max(own["norm"], wanted["norm"]))
