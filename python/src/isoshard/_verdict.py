# SPDX-License-Identifier: Apache-2.0
"""The judge's verdict on two bundles, and what is known of their data beside it."""

from __future__ import annotations

import sys
from pathlib import Path

from . import _program, _reports
from ._data import causes_in_data, check_samples

CONFORMS, DIVERGES = 0, 1


def compare(
    words: list[str], reference: Path, run: Path, *, capture: bool = False
) -> tuple[int, str]:
    """Calls `isoshard-judge compare` with these words; returns exit code and, captured, its text.

    Both bundles are read again for samples that the ranks do not share out, a finding of its own,
    and for what makes a run differ though it is right. Files of --output-dir say it, too.
    """
    sys.stdout.flush()
    code, text = _program.call(["compare", *words], capture=capture)
    if code not in (CONFORMS, DIVERGES):
        return code, text
    lines = check_samples(reference, run)
    is_ours = bool(lines) and code == CONFORMS
    code = DIVERGES if is_ours else code
    if code == DIVERGES:
        lines += causes_in_data(reference, run)
    folder = _reports.folder_in(words)
    if lines and folder is not None:
        _reports.add(folder, lines, diverges=is_ours)
    if is_ours:
        lines[0] = f"DIVERGES  {lines[0]}"
    if capture:
        return code, "\n".join([text.rstrip("\n"), *lines]) + "\n"
    for line in lines:
        print(line, flush=True)
    return code, ""
