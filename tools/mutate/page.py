# SPDX-License-Identifier: Apache-2.0
"""What the runs have shown, as tables in Markdown."""

from __future__ import annotations

import collections
import json
import pathlib

from runs import Runs

EQUIVALENT = pathlib.Path(__file__).parent / "equivalent.json"
STATES = ("verify", "tests", "equivalent", "survived")
JUDGED = ("src/subjects/parallel", "src/core/comm")


def equivalents() -> dict[str, str]:
    """By key why a mutant changes nothing that a run could show; judged by a person."""
    if not EQUIVALENT.is_file():
        return {}
    rows = json.loads(EQUIVALENT.read_text(encoding="utf-8"))["mutants"]
    return {row["key"]: row["why"] for row in rows}


def state_of(phases: dict[str, dict], key: str, known: dict[str, str]) -> str:
    """verify, tests, equivalent or survived; "" if the runs are not done."""
    verify = phases.get("verify", {}).get("result", "")
    if verify not in ("", "conforms", "not run"):
        return "verify"
    tests = phases.get("tests", {}).get("result", "")
    if tests not in ("", "passes", "not run"):
        return "tests"
    if key in known:
        return "equivalent"
    return "survived" if verify and tests else ""


def percent(part: int, whole: int) -> str:
    """Rounded down: 97.99 % is not 98 %."""
    return f"{int(1000 * part / whole) / 10} %" if whole else "-"


class Page:
    """The results of a build, counted."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self.known = equivalents()
        self.results = runs.results()
        self.mutants = runs.data["mutants"]
        self.states = {m["key"]: self.state(m["key"]) for m in self.mutants}

    def state(self, key: str) -> str:
        return state_of(self.results.get(key, {}), key, self.known)

    def score(self) -> tuple[int, int]:
        """How many are killed, of those that are done and not equivalent."""
        counts = collections.Counter(self.states.values())
        killed = counts["verify"] + counts["tests"]
        return killed, killed + counts["survived"]

    def score_of_verify(self) -> tuple[int, int]:
        """In parallel/ and comm/, of what verify comes to and is not equivalent: those it kills."""
        killed = whole = 0
        for mutant in self.mutants:
            verify = self.results.get(mutant["key"], {}).get("verify", {})
            is_judged = mutant["file"].startswith(JUDGED) and verify.get("cases", 0) > 0
            if is_judged and mutant["key"] not in self.known:
                whole += 1
                killed += self.states[mutant["key"]] == "verify"
        return killed, whole

    def folders(self) -> str:
        """A row a folder."""
        rows: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for mutant in self.mutants:
            folder = mutant["file"].rsplit("/", 1)[0]
            phases = self.results.get(mutant["key"], {})
            for name in (folder, "all"):
                rows[name]["mutants"] += 1
                rows[name]["run"] += phases.get("verify", {}).get("cases", 0) > 0
                rows[name][self.states[mutant["key"]] or "open"] += 1
        head = "| folder | mutants | verify runs | killed by verify | by tests | equivalent | "
        head += "survived | not tried |\n|---|---|---|---|---|---|---|---|\n"
        text = ""
        for folder in sorted(rows, key=lambda name: (name == "all", name)):
            row = rows[folder]
            cells = [folder, row["mutants"], row["run"], *(row[s] for s in STATES), row["open"]]
            text += "| " + " | ".join(map(str, cells)) + " |\n"
        return head + text

    def how(self) -> str:
        """A line: what verify said of those that it kills."""
        said = collections.Counter(
            self.results[m["key"]]["verify"]["result"]
            for m in self.mutants
            if self.states[m["key"]] == "verify"
        )
        return ", ".join(f"{count} {word}" for word, count in said.most_common())

    def survivors(self) -> str:
        """A line a mutant that nothing kills, the equivalent ones with their reason."""
        text = ""
        for mutant in self.mutants:
            state = self.states[mutant["key"]]
            if state in ("survived", "equivalent"):
                why = self.known.get(mutant["key"], "")
                place = f"{mutant['file']}:{mutant['line']}"
                change = f"`{mutant['before']}` -> `{mutant['after']}`"
                if mutant["after"] == "":
                    change = f"`{mutant['before']}` left out"
                verify = self.results.get(mutant["key"], {}).get("verify", {})
                tests = self.results.get(mutant["key"], {}).get("tests", {})
                runs = f"{verify.get('cases', 0)} cases, {tests.get('tests', 0)} tests"
                text += f"- {mutant['key']} {place} {change} ({mutant['kind']}; {runs}) {state}"
                text += f": {why}\n" if why else "\n"
        return text

    def text(self) -> str:
        """All of it."""
        killed, whole = self.score()
        by_verify, judged = self.score_of_verify()
        seconds = sum(
            line["seconds"] for phases in self.results.values() for line in phases.values()
        )
        data = self.runs.data
        return (
            f"{len(self.mutants)} mutants of seed {data['seed']}, of {data['candidates']} that are "
            f"possible; {data['refused']} did not compile and were exchanged.\n\n"
            f"Killed: {killed} of {whole} ({percent(killed, whole)}); in parallel/ and comm/ by "
            f"verify alone {by_verify} of {judged} ({percent(by_verify, judged)}) of those that it "
            f"comes to.\nVerify said: {self.how()}.\n"
            f"Copy and build: {data['build_seconds']} s; runs of mutants: {seconds:.0f} s.\n\n"
            + self.folders()
            + "\n"
            + self.survivors()
        )
