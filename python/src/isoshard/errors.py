# SPDX-License-Identifier: Apache-2.0
"""The errors of this package: each says what was wrong and what to do."""

from __future__ import annotations


class IsoshardError(Exception):
    """Base of all errors that this package raises on purpose."""


class UsageError(IsoshardError, ValueError):
    """An argument or option does not make sense."""


class RecordError(IsoshardError, RuntimeError):
    """A training step could not be recorded."""


class NotTrained(RecordError):
    """An optimizer steps parameters that the model no longer has. It is a finding: exit code 1."""


class RunError(IsoshardError, RuntimeError):
    """A command or a worker process failed, so that there is nothing to judge."""


class BundleError(IsoshardError, ValueError):
    """The files of a bundle are not as docs/bundle.md says."""


class CheckpointError(IsoshardError, ValueError):
    """A checkpoint cannot be read or converted. The message begins with the file."""


class Divergence(IsoshardError, AssertionError):
    """A run does not compute what its reference computes. `report` is the judge's text."""

    def __init__(self, message: str, report: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.report = report
        self.exit_code = exit_code
