# SPDX-License-Identifier: Apache-2.0
"""The command of a judged run, kept beside its bundles so that it can be run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import BundleError, UsageError

#: In --output-dir.
FILE = "command.json"
_SCHEMA = 1


@dataclass(frozen=True)
class Command:
    """What was judged, as the user wrote it, and the options that change what its runs compute."""

    words: Sequence[str]
    folder: str  #: where it was started
    mesh: str | None = None
    reference: str | None = None
    reference_command: str | None = None
    loss_reduction: str | None = None
    options_file: str | None = None
    no_dropout: bool = False
    generic_weights: bool = False
    replay: bool = False
    resume_at: int | None = None


def write(command: Command, output_dir: Path) -> None:
    """Leaves the command for `isoshard repro`."""
    content = {"schema": _SCHEMA, **asdict(command)}
    (output_dir / FILE).write_text(json.dumps(content, indent=1) + "\n")


def read(output_dir: Path) -> Command:
    """Raises UsageError if `isoshard judge` did not write the folder."""
    file = output_dir / FILE
    if not file.is_file():
        raise UsageError(
            f"The folder must hold the command that was judged ({FILE}), got none in "
            f"{output_dir}. Judge the script again: isoshard judge --output-dir {output_dir} -- ..."
        )
    try:
        content = json.loads(file.read_text())
        if content.pop("schema") != _SCHEMA:
            raise ValueError(f"not schema {_SCHEMA}")
        return Command(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BundleError(
            f"{file} must be as isoshard judge writes it, got {error}. Judge the script again."
        ) from None
