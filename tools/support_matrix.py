#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The page of systems and frameworks with which isoshard was tried, made from runs.

usage: tools/support_matrix.py record BUILD [--store FILE] [--date YYYY-MM-DD]
       tools/support_matrix.py page [--store FILE] [--page FILE]
       tools/support_matrix.py check [--store FILE] [--page FILE] [--pins FILE]

`record` takes a build folder whose tests ran (./isoshard test, .ci/run): ctest.xml says what ran,
CMakeCache.txt which compiler, LibTorch and source (whose commit is taken), this machine which
system, the Python of ISOSHARD_PYTHON which frameworks. It replaces the record of the same system,
compiler, LibTorch and Python in FILE (docs/reference/support.json). `page` writes
docs/reference/support.md: the rows that are wanted, those without a run marked so, then runs on
anything else, then the frameworks whose scripts were judged. `check` ends with 1 if the page is not
what `page` writes, or if a framework's version is not the one that PINS
(python/live-requirements.txt) installs for its tests.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent
FRAMEWORKS = ["torch", "deepspeed", "megatron-core", "transformers", "torchtitan"]
KEYS = ["system", "compiler", "libtorch", "python"]

INTRODUCTION = """# Where isoshard was tried

This page lists the systems on which the tests ran, and the frameworks whose scripts were judged.
`tools/support_matrix.py page` makes it from docs/reference/support.json. `tools/support_matrix.py
record BUILD` adds the last test run of a build folder to that file. "not run" means that no run of
this combination was recorded. It may work.

## Systems

| system | compiler | LibTorch | Python | tests | result | commit, date |
|---|---|---|---|---|---|---|
"""

FRAMEWORKS_INTRODUCTION = """
## Frameworks

The Python package judged scripts of these versions, on CPUs with gloo. No other version was tried,
and no script was judged on a GPU.

| framework | version | what was judged | page |
|---|---|---|---|
"""


def first_line(*command: str) -> str:
    """What a program prints first; "" where it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return (done.stdout.splitlines() or [""])[0]


def system_of() -> str:
    """As "Debian 12"."""
    text = pathlib.Path("/etc/os-release").read_text(encoding="utf-8")
    fields = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    name = fields.get("NAME", "Linux").replace(" GNU/Linux", "")
    return f"{name} {fields.get('VERSION_ID', '')}".strip()


def cache_of(build: pathlib.Path) -> dict[str, str]:
    """CMake's settings of a build folder."""
    text = (build / "CMakeCache.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w-]+):\w+=(.*)$", text, re.MULTILINE))


def compiler_of(cache: dict[str, str]) -> str:
    """As "GCC 12.2.0"."""
    line = first_line(cache["CMAKE_CXX_COMPILER"], "--version")
    version = re.search(r"\d+\.\d+(\.\d+)?", line.split(") ")[-1])
    name = "Clang" if "clang" in line.lower() else "GCC"
    return f"{name} {version.group(0) if version else '?'}"


def libtorch_of(cache: dict[str, str]) -> str:
    """Its version, as its header says."""
    header = pathlib.Path(cache["LibTorch_INCLUDE_DIR"]) / "torch/headeronly/version.h"
    text = header.read_text(encoding="utf-8")
    parts = [
        re.search(rf"#define TORCH_VERSION_{part} (\d+)", text)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    if not all(parts):
        raise SystemExit(f"{header} must define TORCH_VERSION_MAJOR, _MINOR and _PATCH")
    return ".".join(part.group(1) for part in parts)


def python_of() -> str:
    """As "3.11 (torch 2.11.0)"; "-" where no framework is there."""
    python = os.environ.get("ISOSHARD_PYTHON", "python3")
    script = (
        "import importlib.metadata as m, sys\n"
        "words = []\n"
        f"for name in {FRAMEWORKS!r}:\n"
        "    try: words.append(name + ' ' + m.version(name))\n"
        "    except m.PackageNotFoundError: pass\n"
        "print('%d.%d' % sys.version_info[:2] + ' (' + ', '.join(words) + ')' if words else '-')"
    )
    return first_line(python, "-c", script) or "-"


def result_of(report: pathlib.Path) -> dict[str, int]:
    """Entries of ctest's report by how they ended."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None:
            counts["failed"] += 1
        elif case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def record_of(build: pathlib.Path, date: str) -> dict:
    """A run of the tests of a build folder."""
    cache = cache_of(build)
    source = cache["CMAKE_HOME_DIRECTORY"]
    commit = first_line("git", "-C", source, "rev-parse", "--short=10", "HEAD")
    if first_line("git", "-C", source, "status", "--porcelain", "--untracked-files=no"):
        commit += " and changes"
    return {
        "system": system_of(),
        "compiler": compiler_of(cache),
        "libtorch": libtorch_of(cache),
        "python": python_of(),
        "commit": commit,
        "date": date,
        **result_of(build / "ctest.xml"),
    }


def is_of_row(run: dict, row: dict) -> bool:
    """Whether a run is of a wanted row, which names versions as far as they matter."""
    return all(
        run[key] == wanted or run[key].startswith(wanted + ".") or run[key].startswith(wanted + " ")
        for key, wanted in row.items()
    )


def line_of(words: list[str]) -> str:
    """A row of the table."""
    return "| " + " | ".join(word.replace("|", "/") for word in words) + " |\n"


def line_of_run(run: dict) -> str:
    """A row of a run."""
    ran = run["passed"] + run["failed"]
    result = "passed" if run["failed"] == 0 and ran > 0 else f"{run['failed']} failed"
    if ran == 0:
        result = "no test ran"
    tests = f"{ran} entries" + (f", {run['skipped']} skipped" if run["skipped"] else "")
    return line_of([*(run[key] for key in KEYS), tests, result, f"{run['commit']}, {run['date']}"])


def page_of(store: dict) -> str:
    """The page."""
    text = INTRODUCTION
    rest = list(store["runs"])
    for row in store["wanted"]:
        runs = [run for run in rest if is_of_row(run, row)]
        rest = [run for run in rest if run not in runs]
        if runs:
            text += "".join(line_of_run(run) for run in runs)
        else:
            text += line_of([*(row.get(key, "any") for key in KEYS), "-", "not run", "-"])
    text += "".join(line_of_run(run) for run in rest)
    frameworks = store.get("frameworks", [])
    if frameworks:
        text += FRAMEWORKS_INTRODUCTION
    for row in frameworks:
        page = f"[{row['page']}]({row['page']})"
        text += line_of([row["framework"], row["version"], row["judged"], page])
    return text


def problems_of(store: dict, pins: pathlib.Path) -> list[str]:
    """Frameworks whose version is not the one that their tests install."""
    text = pins.read_text(encoding="utf-8")
    installed = dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.MULTILINE))
    problems = []
    for row in store.get("frameworks", []):
        name, version = row["framework"], row["version"]
        if installed.get(name, version) != version:
            problems.append(f"{name} must be {installed[name]} as in {pins}, got {version}")
    return problems


def text_of(store: dict) -> str:
    """The store, a line for each row."""
    lists = []
    for name, rows in store.items():
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        lists.append(f' "{name}": [\n{lines}\n ]' if rows else f' "{name}": []')
    return "{\n" + ",\n".join(lists) + "\n}\n"


def main() -> int:
    """One of three actions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "page", "check"])
    parser.add_argument("build", nargs="?", type=pathlib.Path)
    parser.add_argument("--store", type=pathlib.Path, default=ROOT / "docs/reference/support.json")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs/reference/support.md")
    parser.add_argument(
        "--pins", type=pathlib.Path, default=ROOT / "python/live-requirements.txt"
    )
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    arguments = parser.parse_args()
    store = json.loads(arguments.store.read_text(encoding="utf-8"))
    if arguments.action == "check":
        problems = problems_of(store, arguments.pins)
        if arguments.page.read_text(encoding="utf-8") != page_of(store):
            problems.append(
                f"{arguments.page} must be what tools/support_matrix.py page writes; run it"
            )
        print("\n".join(problems), end="\n" if problems else "")
        return 1 if problems else 0
    if arguments.action == "page":
        arguments.page.write_text(page_of(store), encoding="utf-8")
        return 0
    if arguments.build is None:
        parser.error("record needs a build folder")
    run = record_of(arguments.build, arguments.date)
    store["runs"] = [old for old in store["runs"] if any(old[key] != run[key] for key in KEYS)]
    store["runs"].append(run)
    arguments.store.write_text(text_of(store), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
