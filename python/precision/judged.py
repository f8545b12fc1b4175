# SPDX-License-Identifier: Apache-2.0
"""Judges a command in both precisions and reads the numbers of the two verdicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from select import select
from typing import IO, Any

from isoshard._precision import FLOAT64, NATIVE, OUTCOMES

PRECISIONS = (NATIVE, FLOAT64)
_LIMIT = 1800.0  # seconds of both verdicts
_SERVER = """
import json, os, sys
from isoshard.cli import main
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1), os.dup2(file, 2), os.close(file)
    try:
        code = main(json.loads(line))
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    print(code, file=answers, flush=True)
"""


@dataclass
class Verdict:
    """What one precision says of a command. Errors and shares are None where it says nothing."""

    outcome: str
    seconds: float
    error: float | None = None  # the largest relative one of a tensor that is not mostly noise
    judged: float | None = None  # the share of the elements of the optimizer's steps
    why: str = ""


class Judge:
    """Calls `isoshard judge` in a process that keeps its imports."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, words: Sequence[str]) -> dict[str, Verdict]:
        """The verdicts of `isoshard judge --precision both` with further words."""
        folder = self._folder / "judged"
        outcomes = folder / OUTCOMES
        outcomes.unlink(missing_ok=True)
        options = ["--precision", "both", "--quiet", "--output-dir", str(folder)]
        text = self._call(["judge", *options, *words])
        found = {}
        if outcomes.exists():
            for outcome in json.loads(outcomes.read_text())["precisions"]:
                precision, status = outcome["precision"], outcome["status"]
                verdict = Verdict(status, outcome["seconds"], why=outcome["why"])
                own = folder if precision == NATIVE else folder / precision
                report = own / "report" / "report.json"
                if status in ("conforms", "diverges") and report.exists():
                    read(json.loads(report.read_text()), verdict)
                found[precision] = verdict
        last = text.strip().splitlines()[-1:] or ["nothing was printed"]
        return {p: found.get(p, Verdict("no verdict", 0.0, why=last[0])) for p in PRECISIONS}

    def _call(self, words: list[str]) -> str:
        log = self._folder / "judge.log"
        if self._process is None or self._process.poll() is not None:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(log)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environment, "COLUMNS": "100000", "HF_HUB_OFFLINE": "1"},
            )
        stdin, stdout = _pipes(self._process)
        stdin.write(json.dumps(words) + "\n")
        stdin.flush()
        if select([stdout], [], [], _LIMIT)[0]:
            stdout.readline()
        else:
            self.close()
        return log.read_text()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


def read(report: dict[str, Any], verdict: Verdict) -> None:
    """Takes the numbers, and the first finding, from a report."""
    case = report["cases"][0]
    tensors = [t for t in case["tensors"] if t["level"] != "exact" and not t["insensitive"]]
    verdict.error = max((t["relative_error"] for t in tensors), default=None)
    verdict.judged = case["judged"]["share_of_steps"] if case["judged"] else None
    if case["findings"]:
        finding = case["findings"][0]
        verdict.why = f"{finding['stage']} {finding['name']} (step {finding['step']})"


def row_of(name: str, precision: str, verdict: Verdict, **more: Any) -> dict[str, Any]:
    """A row of a table."""
    return {"name": name, "precision": precision, **more, **asdict(verdict)}
