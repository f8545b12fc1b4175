# SPDX-License-Identifier: Apache-2.0
"""Compares the buffers that a model begins with, such as tables of rotary frequencies.

Checkpoints do not hold all buffers, so a rank may have others than the single process. A rank may
also have others on purpose. So buffers are named only where a run diverges in its first step.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch

from . import _bundle, _safetensors
from ._data import Finding
from ._dtensor import is_dtensor
from ._names import named_modules


def fingerprints(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Shape, norm and digest of each plain buffer of floating point, by name."""
    found: dict[str, dict[str, Any]] = {}
    for prefix, module in named_modules(model):
        for key, value in module.named_buffers(recurse=False):
            if not value.is_floating_point() or value.is_meta or is_dtensor(value):
                continue
            own = value.detach().to("cpu").contiguous()
            digest = hashlib.blake2b(_safetensors.bytes_of(own), digest_size=16).hexdigest()
            norm = float(own.double().norm())
            name = f"{prefix}.{key}" if prefix else key
            found[name] = {
                "shape": list(own.shape),
                "norm": norm if math.isfinite(norm) else None,
                "digest": digest,
            }
    return found


def check_buffers(reference: Path, run: Path) -> list[Finding]:
    """Buffers that have the reference's shape and other values on some ranks."""
    step = _bundle.read_manifest(reference)["steps"][0]
    manifest = _bundle.read_manifest(run)
    if step not in manifest["steps"]:
        return []
    wanted = _bundle.read_records(reference, step, 0).get("buffers", {})
    size = math.prod(int(axis["degree"]) for axis in manifest["mesh"])
    of_ranks = [_bundle.read_records(run, step, r).get("buffers", {}) for r in range(size)]
    found = []
    for name, buffer in wanted.items():
        others = [rank for rank, own in enumerate(of_ranks) if _differs(own.get(name), buffer)]
        if others:
            finding = Finding(
                step,
                name,
                "buffer_differs",
                None,
                others,
                numbers={
                    "norm": of_ranks[others[0]][name]["norm"] or 0.0,
                    "reference_norm": buffer["norm"] or 0.0,
                },
                kind="param",
                only_if_diverging=True,
            )
            found.append(finding)
    return found


def _differs(own: dict[str, Any] | None, wanted: dict[str, Any]) -> bool:
    is_alike = own is not None and own["shape"] == wanted["shape"]
    return own is not None and is_alike and own["digest"] != wanted["digest"]
