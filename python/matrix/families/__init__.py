# SPDX-License-Identifier: Apache-2.0
"""The frameworks of the matrix, one module for each family.

A family has `specs()`, its cases; `arguments(spec)`, what isoshard.check gets; `PRELOAD`, modules
that worker processes import first; and `ENVIRONMENT`, variables that they need.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

from ..spec import Spec

#: In the order in which they run; each has worker processes of its own.
NAMES = ("native", "nd", "hf_tp", "deepspeed", "hf_train", "megatron")


def family(name: str) -> ModuleType:
    """The module of a family."""
    return importlib.import_module(f"{__name__}.{name}")


def all_specs() -> Iterator[tuple[str, Spec]]:
    """(family, case) of the whole matrix."""
    seen: set[str] = set()
    for name in NAMES:
        for spec in family(name).specs():
            if spec.id not in seen:
                seen.add(spec.id)
                yield name, spec
