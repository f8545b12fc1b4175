# SPDX-License-Identifier: Apache-2.0
"""isoshard: does a parallel training step compute what one process computes?

`isoshard judge -- torchrun ... train.py` judges a script as it is, `isoshard.record` records a
step, and `isoshard.check` judges a parallelized model in a test.
"""

from ._recorder import Recorder
from ._settings import package_version
from .check import Report, check
from .errors import Divergence, IsoshardError, RecordError, RunError, UsageError
from .record import record
from .trainer import trainer_callback

__version__ = package_version()
__all__ = [
    "Divergence",
    "IsoshardError",
    "RecordError",
    "Recorder",
    "Report",
    "RunError",
    "UsageError",
    "__version__",
    "check",
    "record",
    "trainer_callback",
]
