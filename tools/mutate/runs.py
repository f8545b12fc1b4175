# SPDX-License-Identifier: Apache-2.0
"""Runs of a mutated build: what comes to which mutant, and what alarms on it."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import threading
import time

from scratch import Scratch
from sources import MutateError

VERIFY = ["verify", "--preset", "thorough"]
FIRST_CASES = 3  # of those that come to a mutant, the cheapest are tried first
DEADLINE_S = 30  # no rank gets any further for so long: a hang
MEMORY_BYTES = 6 << 30
SAID = {0: "conforms", 1: "diverges", 2: "refused", 3: "refused", 4: "crash, error or hang"}
OTHER_LABELS = {"slow", "gpu", "structure", "package", "python", "live", "browser", "root"}


@functools.cache
def room_of_its_own(keeps_tmp: bool) -> tuple[str, ...]:
    """The beginning of a command line that gives a command processes, /dev/shm and /tmp of its own.

    What sweeps leftovers must not, as a mutant, sweep what others on the machine need. Where this
    is not permitted it is (); then the machine should be one's own.
    """
    mounts = "mount -t tmpfs none /dev/shm"
    if not keeps_tmp:
        mounts += " && mount -t tmpfs none /tmp"
    room = ("unshare", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
    room += ("sh", "-c", mounts + ' && exec "$@"', "sh")
    try:
        done = subprocess.run([*room, "true"], capture_output=True)
    except OSError:
        return ()
    return room if done.returncode == 0 else ()


def run(command: list, limit_s: float, environment: dict, folder: pathlib.Path) -> int | None:
    """The exit code of a command; None if it ran longer than the limit, and was killed.

    A mutant may well ask for all the memory there is: a process gets some GiB and no core dump.
    """
    bounds = ["prlimit", "--core=0", f"--data={MEMORY_BYTES}", "--"]
    room = room_of_its_own(folder.is_relative_to("/tmp"))
    process = subprocess.Popen(
        [*room, *bounds, *map(str, command)],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


class Runs:
    """A build with its recordings (recorded.json) and results (journal.jsonl, appended)."""

    def __init__(self, scratch: Scratch, jobs: int) -> None:
        self.scratch, self.jobs = scratch, jobs
        self.data = scratch.load()
        self.recorded_file = scratch.folder / "recorded.json"
        self.journal = scratch.folder / "journal.jsonl"
        self.lock = threading.Lock()
        self.recorded = {"cases": {}, "tests": {}}
        if self.recorded_file.is_file():
            stored = json.loads(self.recorded_file.read_text(encoding="utf-8"))
            if stored.get("keys") == self.keys():
                self.recorded = stored

    def keys(self) -> list[str]:
        """The mutants in the order of their numbers."""
        return [m["key"] for m in self.data["mutants"]]

    def say(self, text: str) -> None:
        """Prints a line at once: runs take long."""
        with self.lock:
            print(text, flush=True)

    # ---- verify ----------------------------------------------------------------------------------

    def program(self) -> pathlib.Path:
        """The mutated isoshard."""
        return self.scratch.build / "bin" / "isoshard"

    def verify_cases(self, cases: list[str], environment: dict, seconds: float) -> str:
        """What `verify --preset thorough --fail-fast` says of these of its cases.

        They are chosen as cases that were wrong in an earlier report.
        """
        with tempfile.TemporaryDirectory(dir=self.scratch.folder) as name:
            folder = pathlib.Path(name)
            report = {
                "provenance": {"command": ["isoshard", *VERIFY]},
                "cases": [{"case": case, "status": "diverges"} for case in cases],
            }
            (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
            command = [self.program(), "verify", "--failed-from", folder, "--fail-fast", "--quiet"]
            command += ["--deadline", DEADLINE_S]
            code = run(command, 30 + 6 * seconds, environment, folder)
        if code is None:
            return "no end"
        return SAID.get(code, f"crash ({code})")

    def case_names(self) -> list[str]:
        """The cases of the preset, all of which must conform in the unmutated copy."""
        with tempfile.TemporaryDirectory(dir=self.scratch.folder) as name:
            folder = pathlib.Path(name)
            command = [self.program(), *VERIFY, "--quiet", "--output-dir", folder]
            started = time.monotonic()
            code = run(command, 1800, self.scratch.environment(), folder)
            report = folder / "report.json"
            if code != 0 or not report.is_file():
                raise MutateError(f"without a mutant verify must end with 0, got {code}")
            self.recorded["verify_seconds"] = round(time.monotonic() - started, 1)
            cases = json.loads(report.read_text(encoding="utf-8"))["cases"]
        return [case["case"] for case in cases]

    def record_cases(self) -> None:
        """Which mutants each case of verify comes to, and its time: each runs alone, once."""
        names = [name for name in self.case_names() if name not in self.recorded["cases"]]
        self.each(names, self.record_case)

    def record_case(self, case: str) -> None:
        seen = self.scratch.folder / f"seen_{threading.get_ident()}"
        started = time.monotonic()
        verdict = self.verify_cases([case], self.scratch.environment(0, seen), 60)
        if verdict != "conforms":
            raise MutateError(f"without a mutant {case} must conform, got '{verdict}'")
        self.record("cases", case, seen, time.monotonic() - started)

    def record(self, kind: str, name: str, seen: pathlib.Path, seconds: float) -> None:
        numbers = [number for number, byte in enumerate(seen.read_bytes()) if byte]
        with self.lock:
            self.recorded[kind][name] = {"seconds": round(seconds, 2), "seen": numbers}
            self.recorded["keys"] = self.keys()
            self.recorded_file.write_text(json.dumps(self.recorded), encoding="utf-8")
        self.say(f"recorded {name}: {len(numbers)} mutants, {seconds:.1f} s")

    def those_that_see(self, kind: str, number: int) -> list[str]:
        """Cases or tests that come to a mutant, cheapest first."""
        entries = self.recorded[kind].items()
        found = [(data["seconds"], name) for name, data in entries if number in data["seen"]]
        return [name for _, name in sorted(found)]

    def try_verify(self, mutant: dict) -> None:
        """One mutant under the cases that come to it."""
        number = mutant["number"]
        cases = self.those_that_see("cases", number)
        started = time.monotonic()
        result = "not run"
        for part in (cases[:FIRST_CASES], cases[FIRST_CASES:]):
            if not part:
                continue
            seconds = sum(self.recorded["cases"][name]["seconds"] for name in part)
            result = self.verify_cases(part, self.scratch.environment(number), seconds)
            if result != "conforms":
                break
        self.note(mutant, "verify", result, time.monotonic() - started, cases=len(cases))

    # ---- tests -----------------------------------------------------------------------------------

    def test_names(self) -> list[str]:
        """The entries of ctest that are quick and run this build's code."""
        text = self.scratch.call(["ctest", "--test-dir", self.scratch.build, "--show-only=json-v1"])
        names = []
        for entry in json.loads(text[text.index("{") :])["tests"]:
            labels = [p["value"] for p in entry.get("properties", []) if p["name"] == "LABELS"]
            if not OTHER_LABELS.intersection(labels[0] if labels else []) and "command" in entry:
                names.append(entry["name"])
        if not names:
            raise MutateError("the copy must be built with tests, and has none")
        return names

    def run_test(self, name: str, environment: dict, limit_s: float) -> bool:
        """True if an entry of ctest passes. It ends with its first failure."""
        environment = environment | {"GTEST_FAIL_FAST": "1"}
        command = ["ctest", "--test-dir", self.scratch.build, "-R", f"^{escaped(name)}$"]
        command += ["--no-tests=error", "--timeout", int(limit_s)]
        return run(command, limit_s + 60, environment, self.scratch.build) == 0

    def record_tests(self) -> None:
        """Which mutants each test comes to; one that fails without a mutant is left out."""
        names = [name for name in self.test_names() if name not in self.recorded["tests"]]
        self.each(names, self.record_test)

    def record_test(self, name: str) -> None:
        seen = self.scratch.folder / f"seen_{threading.get_ident()}"
        started = time.monotonic()
        if self.run_test(name, self.scratch.environment(0, seen), 600):
            self.record("tests", name, seen, time.monotonic() - started)
        else:
            self.say(f"left out: {name} fails without a mutant")

    def try_tests(self, mutant: dict) -> None:
        """One mutant under the tests that come to it, until one fails."""
        number = mutant["number"]
        names = self.those_that_see("tests", number)
        started = time.monotonic()
        killer = ""
        for name in names:
            limit_s = 60 + 10 * self.recorded["tests"][name]["seconds"]
            if not self.run_test(name, self.scratch.environment(number), limit_s):
                killer = name
                break
        result = killer or ("passes" if names else "not run")
        self.note(mutant, "tests", result, time.monotonic() - started, tests=len(names))

    # ---- journal ---------------------------------------------------------------------------------

    def note(self, mutant: dict, phase: str, result: str, seconds: float, **more) -> None:
        """Appends one result to the journal."""
        line = {"key": mutant["key"], "phase": phase, "result": result}
        line |= {"seconds": round(seconds, 1), **more}
        with self.lock, self.journal.open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(line) + "\n")
        place = f"{mutant['file']}:{mutant['line']}"
        self.say(f"{phase} {result}: {place} {mutant['kind']} ({seconds:.0f} s)")

    def results(self) -> dict[str, dict[str, dict]]:
        """By mutant and phase what the journal said last."""
        found: dict[str, dict[str, dict]] = {}
        if self.journal.is_file():
            for text in self.journal.read_text(encoding="utf-8").splitlines():
                line = json.loads(text)
                found.setdefault(line["key"], {})[line["phase"]] = line
        return found

    def each(self, items: list, work) -> None:
        """Does the work for all items, some at a time; the first error ends it."""
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def verify_all(self, again: set[str]) -> None:
        """All mutants that have no result yet, under verify."""
        self.record_cases()
        done = self.results()
        has_result = {key for key, phases in done.items() if "verify" in phases} - again
        todo = [m for m in self.data["mutants"] if m["key"] not in has_result]
        self.each(todo, self.try_verify)

    def test_survivors(self, again: set[str], left_out: set[str] = frozenset()) -> None:
        """Those that verify does not kill, under the tests; not those that no run can kill."""
        self.scratch.compile_tests(self.jobs)
        self.record_tests()
        done = self.results()
        todo = []
        for mutant in self.data["mutants"]:
            phases = done.get(mutant["key"], {})
            survives = phases.get("verify", {}).get("result") in ("conforms", "not run")
            is_known = "tests" in phases or mutant["key"] in left_out
            if survives and (not is_known or mutant["key"] in again):
                todo.append(mutant)
        self.each(todo, self.try_tests)


def escaped(name: str) -> str:
    """A name as a regular expression of CMake."""
    return "".join("\\" + c if c in ".+*?[](){}^$|\\" else c for c in name)
