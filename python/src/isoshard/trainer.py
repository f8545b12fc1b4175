# SPDX-License-Identifier: Apache-2.0
"""Level 1 for transformers.Trainer: a callback that records its first steps."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

from ._level1 import record
from ._recorder import Recorder


def trainer_callback(directory: str | os.PathLike[str], *, steps: int = 2, **options: Any) -> Any:
    """A callback for `Trainer(callbacks=[...])` that records the first `steps` steps.

    `options` are those of isoshard.record. All ranks build it (Trainer does that).
    """
    from transformers import TrainerCallback

    class RecordCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Begins with the training and ends with it, or after the last step."""

        context: AbstractContextManager[Recorder] | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            optimizer = of["optimizer"]
            plain = getattr(optimizer, "optimizer", optimizer)
            self.context = record(directory, of["model"], plain, steps=steps, **options)
            self.context.__enter__()

        def on_train_end(self, args: Any, state: Any, control: Any, **of: Any) -> None:
            if self.context is not None:
                self.context.__exit__(None, None, None)
                self.context = None

    return RecordCallback()
