# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers with a plan for tensor parallelism, as in python -m matrix."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matrix.expect import expected_of
from matrix.families import hf_tp
from matrix.spec import Spec, mesh

_SCRIPT = Path(__file__).with_name("train_architecture.py")


def spec_of(name: str) -> Spec:
    """The first case that the matrix has of an architecture."""
    steps = 1 if name in hf_tp.ONE_STEP else 2
    return Spec("hf_tp", name, mesh(tp=2), steps=steps, config=(("num_key_value_heads", 4),))


def commands(
    folder: Path, options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """(name, further columns, words of isoshard judge)."""
    torchrun = str(Path(sys.executable).parent / "torchrun")
    for name in hf_tp.PLANS:
        spec = spec_of(name)
        given = ["--mesh", "tp=2", "--steps", str(spec.steps), "--"]
        words = [*given, torchrun, "--nproc-per-node", "2", str(_SCRIPT), name]
        yield name, {"expected": expected_of(spec).outcome}, words
