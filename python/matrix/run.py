# SPDX-License-Identifier: Apache-2.0
"""Runs cases in kept worker processes and writes a line of JSON for each."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from isoshard import IsoshardError, check
from isoshard._environment import chosen_precision
from isoshard._workers import Workers

from .expect import expected_of
from .families import family
from .spec import Spec

TABLE = "results.jsonl"
#: The exit code in float64 beside a native verdict. What is documented are coarse reductions.
_IN_FLOAT64 = {"conforms": 0, "documented": 0, "defect": 1, "refused": None}


class Runner:
    """Worker processes of one family at a time."""

    def __init__(self, timeout: float = 60.0, precision: str | None = None) -> None:
        self._timeout = timeout
        self._precision = chosen_precision(precision)
        self._family: str | None = None
        self._workers: Workers | None = None
        self._cases = self._limit = 0

    def run(self, name: str, spec: Spec, keep: Path | None = None) -> dict[str, Any]:
        """The result of one case. What hangs is run again once: a port may have been taken."""
        result = self._run(name, spec, keep)
        if "did not end in" not in result["verdict"]:
            return result
        return self._run(name, spec, keep) | {"hung_before": True}

    def _run(self, name: str, spec: Spec, keep: Path | None) -> dict[str, Any]:
        start = time.perf_counter()
        result: dict[str, Any] = {"id": spec.id, "family": name, "precision": self._precision}
        try:
            arguments = family(name).arguments(spec)
            common: dict[str, Any] = {
                "mesh": spec.degrees,
                "micro_batches": spec.micro_batches,
                "steps": spec.steps,
                "max_grad_norm": spec.clip,
                "seed": spec.seed,
                "name": spec.id.replace("/", " "),
            }
            workers = self._workers_of(name)
            common |= {"raises": False, "workers": workers, "keep": keep}
            report = check(**common | arguments, precision=self._precision)
            outcomes = [dataclasses.asdict(outcome) for outcome in report.outcomes]
            result |= {"outcome": "conforms" if outcomes[0]["code"] == 0 else "diverges"}
            result |= {"verdict": report.verdict, "checked": report.seconds, "precisions": outcomes}
            if not report.conforms:
                result["report"] = report.text
        except IsoshardError as error:
            result |= {"outcome": "refused", "verdict": _last_line(str(error))}
            result["report"] = str(error)
        result["seconds"] = round(time.perf_counter() - start, 3)
        return result | judged(spec, result)

    def _workers_of(self, name: str) -> Workers:
        if self._workers is None or self._family != name or self._cases >= self._limit:
            self.close()
            module = family(name)
            self._limit = module.CASES
            self._workers = Workers(
                preload=module.PRELOAD, timeout=self._timeout, environment=module.ENVIRONMENT
            )
            self._family, self._cases = name, 0
        self._cases += 1
        return self._workers

    def close(self) -> None:
        """Ends the worker processes."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def judged(spec: Spec, result: dict[str, Any]) -> dict[str, Any]:
    """What was expected of a case, and whether its result is that."""
    expected = expected_of(spec)
    wanted = {"conforms": "conforms", "refused": "refused"}.get(expected.outcome, "diverges")
    words = expected.words
    if result.get("precision") == "float64" and expected.outcome == "documented":
        wanted, words = "conforms", ""
    text = result["verdict"] + result.get("report", "")
    is_met = result["outcome"] == wanted and words in text
    others = result.get("precisions", [])[1:]
    is_met &= all(other["code"] in (None, _IN_FLOAT64[expected.outcome]) for other in others)
    found = {"expected": expected.outcome, "is_met": is_met}
    return found | ({"why": expected.why} if expected.why else {})


def done(folder: Path) -> dict[str, dict[str, Any]]:
    """The results that a folder has already, by case; lines that were cut off are none."""
    path = folder / TABLE
    results = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            result = json.loads(line)
        except json.JSONDecodeError:  # the command was ended while it wrote this line
            continue
        results[result["id"]] = result
    return results


def run_all(
    cases: Iterable[tuple[str, Spec]],
    folder: Path,
    *,
    timeout: float,
    tell: Callable[[dict[str, Any]], None],
    precision: str | None = None,
) -> list[dict[str, Any]]:
    """Runs what has no result in the precision yet, and appends each result to the table."""
    precision = chosen_precision(precision)
    folder.mkdir(parents=True, exist_ok=True)
    known, results = done(folder), []
    runner = Runner(timeout, precision)
    try:
        with (folder / TABLE).open("a") as table:
            if table.tell() and not (folder / TABLE).read_bytes().endswith(b"\n"):
                table.write("\n")
            for name, spec in cases:
                result = known.get(spec.id)
                if result is None or result.get("precision", "native") != precision:
                    result = runner.run(name, spec)
                    table.write(json.dumps(result) + "\n")
                    table.flush()
                else:
                    result = result | judged(spec, result)
                results.append(result)
                tell(result)
    finally:
        runner.close()
    return results
