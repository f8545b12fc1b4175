# SPDX-License-Identifier: Apache-2.0
"""What the mode did to a script, in sentences for the verdict."""

from __future__ import annotations

import json
from pathlib import Path

_notes: dict[str, None] = {}


def note(text: str) -> None:
    """Adds a sentence once."""
    _notes[text] = None


def notes() -> list[str]:
    """All sentences so far, in the order in which they came."""
    return list(_notes)


def write_notes(folder: Path, rank: int) -> None:
    """Leaves the sentences of this process for the driver."""
    if _notes:
        (folder / f"rank{rank:05d}.notes").write_text(json.dumps(notes()))


def read_notes(folder: Path) -> list[str]:
    """The sentences that all processes of a run left."""
    found: dict[str, None] = {}
    for path in sorted(folder.glob("*.notes")):
        found.update(dict.fromkeys(json.loads(path.read_text())))
    return list(found)
