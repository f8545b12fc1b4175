# SPDX-License-Identifier: Apache-2.0
"""The judge's verdict on two bundles, with what this package finds in their data."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import _program
from ._buffers import check_buffers
from ._bundle import with_inputs_alone
from ._call_sites import read_call_sites
from ._data import Cause, Finding, causes_in_data, check_samples, is_about_lost_passes
from .errors import BundleError

CONFORMS, DIVERGES = 0, 1
_SCHEMA = 1


def compare(
    words: list[str],
    reference: Path,
    run: Path,
    *,
    findings: list[Finding] | None = None,
    causes: list[Cause] | None = None,
    notes: Sequence[str] = (),
    capture: bool = False,
) -> tuple[int, str]:
    """Calls `isoshard-judge compare` with these words; returns exit code and, captured, its text.

    Both bundles are read here first, for samples that the ranks do not share out and for what makes
    a run differ though it is right. isoshard-judge is given all of it, so that it alone decides and
    writes every report. `findings`: those about samples, where the caller has looked already; so
    `causes`. `notes`: sentences for every report. Findings get the lines of the script that made
    their tensors.
    """
    sys.stdout.flush()
    try:
        found = check_samples(reference, run) if findings is None else findings
        causes = causes_in_data(reference, run) if causes is None else causes
        sites = read_call_sites(run)
        found = [*found, *check_buffers(reference, run)]
    except BundleError:
        # It names the file and what must be there, if it sees a fault in the files itself.
        code, text = check_bundles(reference, run, capture=capture)
        if code == 0:
            raise
        return code, text
    if not found and not causes and not notes and not sites:
        return _program.call(["compare", *words], capture=capture)
    with tempfile.TemporaryDirectory(prefix="isoshard-") as folder:
        if is_about_lost_passes(found):
            words = list(words)
            for bundle, name in ((reference, "reference"), (run, "run")):
                copy = with_inputs_alone(bundle, Path(folder) / name)
                words[words.index(str(bundle))] = str(copy)
        file = Path(folder) / "findings.json"
        content = {
            "schema": _SCHEMA,
            "findings": [finding.to_json() for finding in found],
            "causes": [cause.to_json() for cause in causes],
            "notes": list(notes),
            "call_sites": sites,
        }
        file.write_text(json.dumps(content))
        return _program.call(["compare", *words, "--findings", str(file)], capture=capture)


def check_bundles(reference: Path, run: Path, *, capture: bool = False) -> tuple[int, str]:
    """Exit code and text of `isoshard-judge bundle check`, which says what is wrong with files."""
    result = _program.call(["bundle", "check", str(reference), str(run)], capture=True)
    if result[0] != 0 and not capture:
        print(result[1], end="", file=sys.stderr)
    return result
