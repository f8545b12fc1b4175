# SPDX-License-Identifier: Apache-2.0
"""Adds what the package itself finds to the files that isoshard-judge wrote (--output-dir)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

_FLAG = "--output-dir"


def folder_in(words: Sequence[str]) -> Path | None:
    """The folder that a command line names for reports; None: it names none."""
    folder = None
    for i, word in enumerate(words):
        if word == _FLAG and i + 1 < len(words):
            folder = Path(words[i + 1])
        elif word.startswith(f"{_FLAG}="):
            folder = Path(word.partition("=")[2])
    return folder


def add(folder: Path, lines: Sequence[str], *, diverges: bool) -> None:
    """Adds lines to report.txt and to the notes of report.json.

    `diverges`: the first line is why a run does not conform that the judge found nothing wrong in.
    Then report.json and junit.xml say so, too.
    """
    text = folder / "report.txt"
    with text.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    path = folder / "report.json"
    data = json.loads(path.read_text())
    for case in data["cases"]:
        case["notes"] = [*case.get("notes", []), *lines]
        if diverges:
            case.update(status="diverges", strength=None, reason=lines[0])
    if diverges:
        data["exit_code"] = 1
        _fail(folder / "junit.xml", lines[0])
    path.write_text(json.dumps(data, indent=1) + "\n")


def _fail(path: Path, why: str) -> None:
    tree = ElementTree.parse(path)
    cases = list(tree.iter("testcase"))
    for case in cases:
        for properties in case.iter("properties"):
            for item in list(properties):
                if item.get("name") == "verdict":
                    item.set("value", "DIVERGES")
                elif item.get("name") == "strength":
                    properties.remove(item)
        ElementTree.SubElement(case, "failure", message=why)
    for suite in (*tree.iter("testsuites"), *tree.iter("testsuite")):
        suite.set("failures", str(len(cases)))
    tree.write(path, encoding="UTF-8", xml_declaration=True)
