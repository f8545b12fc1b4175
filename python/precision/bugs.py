# SPDX-License-Identifier: Apache-2.0
"""Random bugs: a seed draws a kind, a place and a size for each."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .script import command, right, write

#: Kind -> where the lines go, and the lines. p is a parameter, f a factor near 1, i a layer.
_KINDS = {
    "gradient is scaled": ("after", "p.grad.mul_(f)"),
    "gradient of rank 0 is scaled": ("after", "rank == 0 and p.grad.mul_(f)"),
    "gradient of rank 1 replaces the mean": ("after", "dist.broadcast(p.grad, 1)"),
    "gradient lacks a row": ("after", "p.grad[row % len(p)] = 0"),
    "gradient has two rows swapped": (
        "after",
        "p.grad[[0, row % len(p)]] = p.grad[[row % len(p), 0]]",
    ),
    "gradient is shifted": ("after", "p.grad.add_(p.grad.abs().mean() * (f - 1))"),
    "clipping is left out": ("after", "p.grad.mul_(1.5)"),
    "weight decay is added twice": ("stepped", "p.data.mul_(1 - 1e-3 * 0.01)"),
    "step is scaled": ("stepped", "p.data.mul_(f)"),
    "rate differs": ("before", "optimizer.param_groups[0]['lr'] *= f"),
    "second moment decays otherwise": (
        "before",
        "optimizer.param_groups[0]['betas'] = (0.9, 1 - 0.001 * f)",
    ),
    "weight is scaled in forward": ("before", "p.data.mul_(f)"),
    "activation is scaled": ("before", "hook(layer, lambda m, x, y: y * f)"),
    "activation of rank 1 is scaled": ("before", "rank and hook(layer, lambda m, x, y: y * f)"),
    "activation is shifted": ("before", "hook(layer, lambda m, x, y: y + (f - 1))"),
    "epsilon of the norm differs": ("before", "model.module[3].eps *= 1 + 100 * (f - 1)"),
    "logits of a sample are lost": ("before", "hook(layer, lambda m, x, y: y.roll(1, 0))"),
    "loss is scaled": ("after", "[q.grad.mul_(f) for q in model.parameters()]"),
}


def drawn(number: int, seed: int) -> Iterator[tuple[str, str, str, str]]:
    """(kind, setting, where, lines) of each bug."""
    generator = random.Random(seed)
    for _ in range(number):
        kind = generator.choice(sorted(_KINDS))
        where, lines = _KINDS[kind]
        size = 10 ** generator.uniform(-7, -1)
        factor = 1 + generator.choice((-1, 1)) * size
        parameter, layer = generator.randrange(7), generator.randrange(5)
        row = generator.randrange(1, 16)
        setting = (
            f"f, row, layer = {factor!r}, {row}, model.module[{layer}]\n"
            f"p = list(model.parameters())[{parameter}]"
        )
        yield kind, setting, where, lines


def commands(
    folder: Path, options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any], list[str], Path]]:
    """(name, further columns, the command, the right script)."""
    for dtype in ("bfloat16", "float32"):
        for i, (kind, setting, where, lines) in enumerate(drawn(options.number, options.seed)):
            path = folder / f"bug_{dtype}_{options.seed}_{i}.py"
            write(path, dtype, setting, **{where: lines})
            name = f"{dtype} seed {options.seed} bug {i}"
            yield name, {"dtype": dtype, "kind": kind}, command(path), right(folder, dtype)
