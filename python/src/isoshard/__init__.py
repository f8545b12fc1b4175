# SPDX-License-Identifier: Apache-2.0
"""isoshard: does a parallel training step compute what one process computes?

`isoshard judge -- torchrun ... train.py` judges a script as it is, `isoshard.record` records a
step, and `isoshard.check` judges a parallelized model in a test. torch is imported with the first
name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import BundleError, Divergence, IsoshardError, RecordError, RunError, UsageError

if TYPE_CHECKING:
    from ._level1 import enter_float64, record
    from ._level3 import Report, check
    from ._recorder import Recorder
    from .trainer import trainer_callback

    __version__: str

_MODULE_OF = {
    "Recorder": "_recorder",
    "Report": "_level3",
    "check": "_level3",
    "enter_float64": "_level1",
    "record": "_level1",
    "trainer_callback": "trainer",
}

__all__ = [
    "BundleError",
    "Divergence",
    "IsoshardError",
    "RecordError",
    "Recorder",
    "Report",
    "RunError",
    "UsageError",
    "__version__",
    "check",
    "enter_float64",
    "record",
    "trainer_callback",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("._settings", __name__).package_version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value
