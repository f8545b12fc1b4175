# SPDX-License-Identifier: Apache-2.0
"""Judges mistakes one after the other and keeps a line of JSON for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .truth import Mistake

_HERE = Path(__file__).parent
_STATUS = {0: "conforms", 2: "refused", 3: "refused", 4: "failed"}
_LIMIT = 600.0  # seconds of one verdict


def judge(mistake: Mistake, precision: str, folder: Path) -> dict[str, Any]:
    """The record of one case: what `isoshard judge` says of the loop with the mistake."""
    report = folder / "judged" / "report" / "report.json"
    report.unlink(missing_ok=True)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    script = str(_HERE / f"{mistake.loop}.py")
    steps = str(mistake.judged_steps)
    words = [sys.executable, "-m", "isoshard", "judge", "--precision", precision, "--steps", steps]
    words += ["--output-dir", str(folder / "judged"), "--report", str(report), "--timeout", "60"]
    words += ["--", torchrun, "--nproc-per-node", "2", script]
    words += ["--steps", str(mistake.judged_steps + 2), "--mistake", mistake.name]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env={**environment, "COLUMNS": "100000"},
        timeout=_LIMIT,
    )
    record = {"id": mistake.id, "precision": precision, "exit": done.returncode}
    record |= verdict(done.returncode, done.stdout + done.stderr, report)
    return record | {"seconds": round(time.perf_counter() - start, 1)}


def verdict(code: int, printed: str, report: Path) -> dict[str, Any]:
    """Status, first wrong tensor, causes and text, of the report or, without one, of the output."""
    found: dict[str, Any]
    if not report.exists():
        lines = [line for line in printed.splitlines() if line.strip() and "..." not in line[-4:]]
        text = " ".join(line.strip() for line in lines[-8:])
        status = "diverges" if code == 1 else _STATUS[code]
        found = {"status": status, "first": None, "causes": []}
        return found | {"text": _without_paths(text, report)}
    case = json.loads(report.read_text())["cases"][0]
    found = {"status": case["status"], "first": None, "causes": []}
    if case["findings"]:
        finding = case["findings"][0]
        keys = ("stage", "kind", "name", "step", "ranks")
        found["first"] = {key: finding[key] for key in keys} | {"finding": finding["finding"]["id"]}
        causes = [f["cause"]["id"] for f in case["findings"] if f["cause"] is not None]
        found["cause"] = finding["cause"]
        found["causes"] = list(dict.fromkeys(causes))
        found["evidence"] = finding["evidence"]
    return found | {"text": _without_paths(case["reason"] or "", report)}


def _without_paths(text: str, report: Path) -> str:
    """The text with names of files in place of paths of this machine."""
    for folder in (_HERE, report.parents[1], Path(sys.executable).parent, Path(sys.prefix)):
        text = text.replace(f"{folder}/", "")
    return text


def done(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The records that a file has, by id and precision; lines that were cut off are none."""
    records = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # the command was ended while it wrote this line
            continue
        records[record["id"], record["precision"]] = record
    return records


def run_all(
    mistakes: Iterable[Mistake],
    precision: str,
    folder: Path,
    path: Path,
    tell: Callable[[dict[str, Any]], None],
) -> list[dict[str, Any]]:
    """Judges what has no record in the precision yet, and appends each record to the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    known, records = done(path), []
    with path.open("a") as file:
        if file.tell() and not path.read_bytes().endswith(b"\n"):
            file.write("\n")
        for mistake in mistakes:
            record = known.get((mistake.id, precision))
            if record is None:
                record = judge(mistake, precision, folder)
                file.write(json.dumps(record) + "\n")
                file.flush()
            records.append(record)
            tell(record)
    return records
