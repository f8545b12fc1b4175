# SPDX-License-Identifier: Apache-2.0
"""Judges what remains of a run of which some records cannot be judged.

Ranks may hold parts that do not make the reference's tensor: one rank skips a layer, has fewer
samples, or no optimizer state. isoshard-judge then rejects the whole bundle. A bug is the likely
reason, and often shows in other records, too. Only a run that diverges there gets a verdict by
them: one that conforms without these records has not shown that it does.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import _bundle

Record = dict[str, Any]
#: Of one argument of a command: Linux allows 128 KiB.
_MOST_CHARACTERS = 100_000


def _has_no_place(record: Record) -> bool:
    kinds = ("activation", "activation_grad")
    return bool(record["kind"] in kinds and record.get("layout") == "infer")


def _is_loss(record: Record) -> bool:
    return record["kind"] == "scalar" and fnmatch.fnmatchcase(record["name"], "loss*")


def _is_state(record: Record) -> bool:
    return bool(record["kind"] == "optimizer")


def _is_cut(record: Record) -> bool:
    is_part = "flat" in record or record["local_shape"] != record.get("global_shape")
    return record["kind"] in ("param", "grad") and is_part


#: What is left out, in this order, each beside those before it.
_LEFT_OUT: tuple[Callable[[Record], bool], ...] = (_has_no_place, _is_loss, _is_state, _is_cut)


def copies_without_misfits(run: Path, folder: Path) -> Iterator[tuple[Path, list[str], str]]:
    """Copies of a run, each with fewer records than the one before.

    Each comes with the KIND/NAME of what is not in it, and a sentence for the reports.
    """
    if "compared_with" in _bundle.read_manifest(run):
        return  # what the ranks compared is not stored
    before: list[str] = []
    for number in range(1, len(_LEFT_OUT) + 1):
        copy = folder / f"remains{number}"
        missing = _write_copy(run, copy, _LEFT_OUT[:number])
        is_short = len(",".join(missing)) < _MOST_CHARACTERS
        if missing and missing != before and is_short:
            others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            said = (
                "Not judged, because their parts on the ranks do not fit together: "
                f"{missing[0]}{others}. What remains diverges."
            )
            yield copy, missing, said
        _bundle.remove_bundle(copy)  # it was of no use
        before = missing


def _write_copy(run: Path, copy: Path, left_out: Sequence[Callable[[Record], bool]]) -> list[str]:
    """Writes a copy without these records, in any rank and step; returns their KIND/NAME."""
    missing = {
        f"{record['kind']}/{record['name']}"
        for step in _bundle.read_manifest(run)["steps"]
        for rank in _bundle.ranks_of_step(run, step)
        for record in _bundle.read_records(run, step, rank)["records"]
        if any(is_left_out(record) for is_left_out in left_out)
    }
    if not missing:
        return []
    _bundle.write_part(run, copy, lambda _, r: f"{r['kind']}/{r['name']}" not in missing)
    return sorted(missing)
