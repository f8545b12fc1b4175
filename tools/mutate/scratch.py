# SPDX-License-Identifier: Apache-2.0
"""A copy of the tree with all mutants in it, and its one build."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import time

import mutations
import switches
from choose import Choice
from mutations import Mutant
from sources import Compiled, MutateError, Parser

ROUNDS = 12
MOST = 9_999  # mutants of one build
CACHED = ("LIBTORCH_ROOT", "CMAKE_CXX_COMPILER", "CMAKE_C_COMPILER")


def write_if_changed(file: pathlib.Path, text: bytes) -> None:
    """Writes a file unless it says so already: what is not written is not built again."""
    if file.is_file() and file.read_bytes() == text:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text)


def cached_settings(build: pathlib.Path) -> list[str]:
    """Options of CMake that make a build like this one."""
    text = (build / "CMakeCache.txt").read_text(encoding="utf-8")
    options = []
    for name in CACHED:
        if match := re.search(rf"^{name}:\w+=(.+)$", text, re.MULTILINE):
            options.append(f"-D{name}={match[1]}")
    return options


class Scratch:
    """The folder of a mutated copy: sources, build/, and mutants.json."""

    def __init__(self, tree: pathlib.Path, folder: pathlib.Path) -> None:
        self.tree, self.folder = tree, folder
        self.build = folder / "build"
        self.store = folder / "mutants.json"
        self.log = folder / "mutate-build.log"

    # ---- making it -------------------------------------------------------------------------------

    def copy_tree(self) -> None:
        """Copies what git knows, as it stands now; files that are gone are removed."""
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=self.tree, capture_output=True, check=True
        ).stdout.decode()
        names = [name for name in listed.split("\0") if name and (self.tree / name).is_file()]
        for name in names:
            source, target = self.tree / name, self.folder / name
            if not source.is_symlink():
                write_if_changed(target, source.read_bytes())
                shutil.copymode(source, target)
        kept = {name for name in names if name.startswith("src/")}
        for file in sorted((self.folder / "src").rglob("*")):
            if file.is_file() and str(file.relative_to(self.folder)) not in kept:
                file.unlink()

    def configure(self, like: pathlib.Path) -> None:
        """Configures the copy as the build folder `like` is."""
        command = ["cmake", "-S", self.folder, "-B", self.build, "-G", "Ninja"]
        self.call([*command, "-DISOSHARD_BUILD_BENCH=OFF", *cached_settings(like)])

    def call(self, command: list) -> str:
        """Runs a command; fails with its last lines."""
        done = subprocess.run(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode != 0:
            raise MutateError(f"{command[0]} failed:\n" + done.stdout[-4000:])
        return done.stdout

    def make(self, like: pathlib.Path, count: int, seed: int, jobs: int) -> None:
        """Copy, choice, switches and build; mutants that do not compile make room for others."""
        self.folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        self.copy_tree()
        self.configure(like)
        parser = Parser(self.compiled(), self.folder / "trees")
        candidates = self.candidates(parser)
        choice = Choice(candidates, count, seed)
        print(f"{len(candidates)} mutants of {len(choice.taken)} folders are possible")
        choice.drop({m for m in candidates if m.key in self.refused()})
        self.check(parser, choice)
        for _ in range(ROUNDS):
            self.write_switches(choice.chosen())
            errors = self.compile(jobs)
            if not errors:
                break
            self.exchange(choice, self.blamed(errors, choice.chosen()))
        else:
            raise MutateError(f"after {ROUNDS} rounds mutants still do not compile; see {self.log}")
        self.save(choice.chosen(), seed, len(candidates), time.monotonic() - started)

    def compiled(self) -> Compiled:
        """What the copy compiles, without switches: it may have some from the last time."""
        self.write_switches([])
        return Compiled(self.build)

    def check(self, parser: Parser, choice: Choice) -> None:
        """Exchanges what Clang refuses, which is cheaper than a build; GCC has the last word."""
        unit_of = parser.compiled.unit_of
        checked: dict[pathlib.Path, list[Mutant]] = {}  # what each unit held when it was right
        while True:
            units: dict[pathlib.Path, list[Mutant]] = collections.defaultdict(list)
            for mutant in choice.chosen():
                units[unit_of[self.folder / mutant.name]].append(mutant)
            todo = [unit for unit, held in units.items() if checked.get(unit) != held]
            if not todo:
                return
            self.write_switches(choice.chosen())
            held = units[todo[0]]
            lines = parser.errors_in({self.folder / mutant.name for mutant in held})
            wrong = {(str(file.relative_to(self.folder)), line) for file, line in lines}
            if bad := self.of_lines(wrong, held):
                self.exchange(choice, bad)
            else:
                checked[todo[0]] = held

    def exchange(self, choice: Choice, bad: list[Mutant]) -> None:
        """Others for those that do not compile, which are remembered."""
        print(f"{len(bad)} mutants do not compile and are exchanged", flush=True)
        keys = sorted(self.refused() | {mutant.key for mutant in bad})
        write_if_changed(self.folder / "refused.json", json.dumps(keys).encode())
        choice.drop(set(bad))

    def refused(self) -> set[str]:
        """Keys of the mutants that did not compile."""
        file = self.folder / "refused.json"
        return set(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else set()

    def candidates(self, parser: Parser) -> list[Mutant]:
        """All mutants of the sources below src/ that this build compiles, tests apart."""
        compiled = parser.compiled
        found: list[Mutant] = []
        for source in sorted(compiled.unit_of, key=lambda s: (compiled.unit_of[s], s)):
            if not source.is_relative_to(self.folder / "src") or source.name.endswith("_test.cc"):
                continue
            name = str(source.relative_to(self.folder))
            try:
                found += self.mutants_of(parser, source, name)
            except MutateError as error:  # what GCC takes and Clang does not
                print(f"left out: {error}")
        return found

    def mutants_of(self, parser: Parser, source: pathlib.Path, name: str) -> list[Mutant]:
        """The mutants of a source; those of an earlier run if neither it nor the tool changed."""
        digest = hashlib.sha256(source.read_bytes())
        digest.update(pathlib.Path(mutations.__file__).read_bytes())
        store = self.folder / "trees" / (name.replace("/", "+") + ".json")
        if store.is_file():
            known = json.loads(store.read_text(encoding="utf-8"))
            if known["digest"] == digest.hexdigest():
                return [Mutant(**row) for row in known["mutants"]]
        found = mutations.mutants_of(parser, source, name)
        rows = [dataclasses.asdict(mutant) for mutant in found]
        text = json.dumps({"digest": digest.hexdigest(), "mutants": rows})
        write_if_changed(store, text.encode())
        return found

    def write_switches(self, mutants: list[Mutant]) -> None:
        """The chosen mutants, numbered from 1, in the copy's sources."""
        files: dict[str, dict[int, Mutant]] = collections.defaultdict(dict)
        for number, mutant in enumerate(mutants, 1):
            files[mutant.name][number] = mutant
        # a fixed size: the header changes nothing that is not mutated
        file = self.folder / "src" / switches.HEADER_NAME
        write_if_changed(file, switches.header(MOST).encode())
        for file in (self.folder / "src").rglob("*.cc"):
            name = str(file.relative_to(self.folder))
            text = (self.tree / name).read_bytes()
            write_if_changed(file, switches.switched(text, files[name]) if files[name] else text)

    # ---- building it -----------------------------------------------------------------------------

    def compile(self, jobs: int) -> str:
        """Builds the program and all of src/; what the compiler says if it fails, else ""."""
        listed = self.call(["ninja", "-C", self.build, "-t", "targets", "all"])
        libraries = re.findall(r"^(src/\S+\.a): ", listed, re.MULTILINE)
        return self.ninja(jobs, [*libraries, "isoshard_app"])

    def compile_tests(self, jobs: int) -> None:
        """Builds what is left, the test programs.   Errors   MutateError if that fails."""
        if self.ninja(jobs, []):
            raise MutateError(f"the tests of the copy do not build; see {self.log}")

    def ninja(self, jobs: int, targets: list[str]) -> str:
        """Builds targets, or all; what it says if that fails, else ""."""
        command = ["ninja", "-C", self.build, f"-j{jobs}", "-k0", *targets]
        with self.log.open("w", encoding="utf-8") as log:
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
        if done.returncode == 0:
            return ""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def blamed(self, errors: str, mutants: list[Mutant]) -> list[Mutant]:
        """The mutants in lines that errors name, or nearest before them in the same file: one may
        change a deduced type, which another line then cannot use.

        Errors   MutateError if there are none.
        """
        place = re.compile(r"\b(src/(?:\w+/)+\w+\.cc):(\d+):")
        lines: set[tuple[str, int]] = set()
        for block in re.split(r"(?=^FAILED: )", errors, flags=re.MULTILINE)[1:]:
            for line in block.splitlines():
                is_error = " error: " in line or "required from" in line or "note:" in line
                if is_error and (match := place.search(line)):
                    lines.add((match[1], int(match[2])))
        bad = self.of_lines(lines, mutants)
        if not bad:
            before = [m for m in mutants for name, n in lines if m.name == name and m.line <= n]
            bad = sorted(before, key=lambda m: m.line)[-1:]
        if not bad:
            raise MutateError(f"the copy does not build, and no mutant is to blame; see {self.log}")
        return bad

    def of_lines(self, lines: set[tuple[str, int]], mutants: list[Mutant]) -> list[Mutant]:
        """Those of these mutants that stand in one of the lines."""
        return [m for m in mutants if any((m.name, n) in lines for n in switches.lines_of(m))]

    # ---- what it holds ---------------------------------------------------------------------------

    def save(self, mutants, seed: int, candidates: int, seconds: float) -> None:
        """Writes mutants.json."""
        text = json.dumps(
            {
                "seed": seed,
                "candidates": candidates,
                "refused": len(self.refused()),
                "build_seconds": round(seconds, 1),
                "mutants": [
                    {
                        "number": number,
                        "key": m.key,
                        "file": m.name,
                        "line": m.line,
                        "kind": m.kind,
                        "before": m.before,
                        "after": m.after,
                    }
                    for number, m in enumerate(mutants, 1)
                ],
            },
            indent=1,
        )
        write_if_changed(self.store, (text + "\n").encode())

    def load(self) -> dict:
        """What mutants.json says.   Errors   MutateError if there is no finished build."""
        if not self.store.is_file():
            raise MutateError(f"{self.store} must exist: run `tools/mutate build` first")
        return json.loads(self.store.read_text(encoding="utf-8"))

    def environment(self, number: int = 0, seen: pathlib.Path | None = None) -> dict[str, str]:
        """The environment that turns one mutant on, and records which are come to."""
        result = dict(os.environ)
        for name in list(result):
            if name.startswith("ISOSHARD_"):
                del result[name]
        if number:
            result["ISOSHARD_MUTANT"] = str(number)
        if seen is not None:
            seen.write_bytes(bytes(MOST + 1))
            result["ISOSHARD_MUTANTS_SEEN"] = str(seen)
        return result
