# SPDX-License-Identifier: Apache-2.0
"""What the mode did to a script: sentences for the verdict, and the coarsest dtype it asked for."""

from __future__ import annotations

import json
from pathlib import Path

import torch

_notes: dict[str, None] = {}
_coarse: set[str] = set()
#: By identity, since all names are equal here. The coarsest comes first.
_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def note(text: str) -> None:
    """Adds a sentence once."""
    _notes[text] = None


def see(dtype: torch.dtype) -> None:
    """Remembers a real dtype of 16 bits in which the native program rounds."""
    _coarse.update(name for name, known in _NAMES.items() if known is dtype)


def notes() -> list[str]:
    """All sentences so far, in the order in which they came."""
    return list(_notes)


def write_notes(folder: Path, rank: int) -> None:
    """Leaves what is known of this process for the driver."""
    content = {"notes": notes(), "coarse": sorted(_coarse)}
    (folder / f"rank{rank:05d}.notes").write_text(json.dumps(content))


def read_notes(folder: Path) -> tuple[list[str], str | None]:
    """The sentences of all processes of a run, and its coarsest dtype of 16 bits or None."""
    found: dict[str, None] = {}
    coarse: set[str] = set()
    for path in sorted(folder.glob("*.notes")):
        content = json.loads(path.read_text())
        found.update(dict.fromkeys(content["notes"]))
        coarse.update(content["coarse"])
    return list(found), next((name for name in _NAMES if name in coarse), None)
