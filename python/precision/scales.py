# SPDX-License-Identifier: Apache-2.0
"""Scale errors of 1e-1 to 1e-10 on one gradient, one bias and one activation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .script import command, right, write

_PLACES = {
    "gradient": {"after": "model.module[1].weight.grad.mul_(factor)"},
    "bias": {"before": "hook(model.module[1], lambda m, x, y: y + m.bias * (factor - 1))"},
    "activation": {"before": "hook(model.module[2], lambda m, x, y: y * factor)"},
}


def commands(
    folder: Path, options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any], list[str], Path]]:
    """(name, further columns, the command, the right script)."""
    for dtype in ("float32", "bfloat16"):
        for place, lines in _PLACES.items():
            for power in range(1, 11):
                factor = f"factor = 1 + 1e-{power}"
                path = folder / f"scale_{dtype}_{place}_{power}.py"
                write(path, dtype, factor, **lines)
                more = {"dtype": dtype, "place": place, "power": power}
                yield f"{dtype} {place} 1e-{power}", more, command(path), right(folder, dtype)
