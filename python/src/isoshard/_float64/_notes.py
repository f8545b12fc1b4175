# SPDX-License-Identifier: Apache-2.0
"""What the mode did to a script: sentences for the verdict, and the coarsest dtype it asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_notes: dict[str, None] = {}
_coarse: set[str] = set()
_made: set[str] = set()
_outside: set[str] = set()
_failed = ""
#: The coarsest comes first.
_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: By id, because all dtypes have one hash here.
_NAME_OF = {id(dtype): name for name, dtype in _NAMES.items()}


def forget() -> None:
    """Begins anew: a kept process goes on with another program."""
    global _failed
    _notes.clear()
    _coarse.clear()
    _made.clear()
    _outside.clear()
    _failed = ""


def note(text: str) -> None:
    """Adds a sentence once."""
    _notes[text] = None


def see(dtype: torch.dtype) -> None:
    """Remembers a real dtype of 16 bits in which the native program rounds."""
    _coarse.update(_of_16_bits(dtype))


def see_made(dtype: torch.dtype) -> None:
    """Remembers the real dtype of a tensor, which may have been read and be widened at once."""
    _made.update(_of_16_bits(dtype))


def has_seen_16_bits() -> bool:
    """Whether the native program has a tensor of 16 bits, as far as is known."""
    return bool(_coarse or _made)


def _of_16_bits(dtype: torch.dtype) -> list[str]:
    name = _NAME_OF.get(id(dtype))
    return [] if name is None else [name]


def see_outside(place: str) -> None:
    """Remembers a line of the script that gives narrow numbers of numpy to torch."""
    _outside.add(place)


def see_failed(operation: str, error: BaseException) -> None:
    """Remembers the last operation that raised; the program may have gone on without it."""
    global _failed
    said = str(error).strip().partition("\n")[0]
    _failed = f"{operation} fails ({type(error).__name__}: {said})"


def notes() -> list[str]:
    """All sentences so far, in the order in which they came."""
    return list(_notes)


def write_notes(folder: Path, rank: int) -> None:
    """Leaves what is known of this process for the driver."""
    content = {"notes": notes(), "coarse": sorted(_coarse), "failed": _failed}
    content["outside"] = sorted(_outside)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank:05d}.notes").write_text(json.dumps(content))


def read_notes(folder: Path) -> tuple[list[str], str | None]:
    """The sentences of all processes of a run, and its coarsest dtype of 16 bits or None."""
    found: dict[str, None] = {}
    coarse: set[str] = set()
    for content in _contents(folder):
        found.update(dict.fromkeys(content["notes"]))
        coarse.update(content["coarse"])
    return list(found), next((name for name in _NAMES if name in coarse), None)


def read_failed(folder: Path) -> str:
    """The operation that failed last in the first process in which one did; empty if none did."""
    return next((c["failed"] for c in _contents(folder) if c["failed"]), "")


def read_outside(reference: Path, run: Path) -> list[str]:
    """Lines where the ranks of a run take narrow numbers of numpy, and the reference does not.

    The names mean nothing to numpy: what passes through it is rounded, in the run alone.
    """
    of_run, of_reference = (
        {place for content in _contents(folder) for place in content["outside"]}
        for folder in (run, reference)
    )
    return sorted(of_run - of_reference)


def _contents(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.notes"))]
