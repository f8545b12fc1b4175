# SPDX-License-Identifier: Apache-2.0
"""Judges many wrong versions of one script against references that are made once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from isoshard._judge import Driver, JudgeOptions
from isoshard._seconds import Seconds
from isoshard.errors import Divergence, RunError

from .judged import PRECISIONS, Verdict, read

_WORDS = {0: "conforms", 1: "diverges"}


@dataclass
class _Reference:
    options: JudgeOptions
    folder: Path
    reference: Path


class Kept:
    """Verdicts on commands of which one process computes what the right script computes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[tuple[str, str], _Reference] = {}
        os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

    def __call__(self, words: Sequence[str], right: Path) -> dict[str, Verdict]:
        """The verdicts on a command; `right` is the script whose single process is the reference.

        Without the self-check: the right script passes it.
        """
        return {p: self._verdict(list(words), right, p) for p in PRECISIONS}

    def _verdict(self, words: list[str], right: Path, precision: str) -> Verdict:
        kept = self._references.get((right.name, precision))
        if kept is None:
            kept = self._made([*words[:-1], str(right)], right, precision)
        options = replace(kept.options, command=words)
        start = time.perf_counter()
        printed = io.StringIO()
        assert options.report is not None
        options.report.unlink(missing_ok=True)
        try:
            with contextlib.redirect_stdout(printed):
                driver = Driver(options, kept.folder, Seconds(), precision)
                code = driver.judge_run(kept.reference)
            verdict = Verdict(_WORDS.get(code, f"exit {code}"), 0.0)
        except Divergence as error:
            verdict = Verdict("diverges", 0.0, why=str(error))
        except RunError as error:
            verdict = Verdict("no verdict", 0.0, why=str(error).splitlines()[0])
        if options.report.exists():
            read(json.loads(options.report.read_text()), verdict)
        verdict.seconds = round(time.perf_counter() - start, 2)
        return verdict

    def _made(self, words: list[str], right: Path, precision: str) -> _Reference:
        folder = self._folder / f"{right.stem}.{precision}"
        folder.mkdir(exist_ok=True)
        options = JudgeOptions(words, quiet=True, report=folder / "report.json")
        driver = Driver(options, folder, Seconds(), precision)
        driver.prepare()
        reference = driver.make_reference()
        driver.make_responses(reference)
        made = _Reference(options, folder, reference)
        self._references[right.name, precision] = made
        return made

    def close(self) -> None:
        """Nothing stays open."""
