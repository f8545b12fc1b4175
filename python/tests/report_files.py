# SPDX-License-Identifier: Apache-2.0
"""What the files of a report say, in each format: exit code and verdict."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

Said = tuple[int, str]
_WORDS = ("CONFORMS", "DIVERGES", "VACUOUS", "INCOMPLETE")
_CODES = {"CONFORMS": 0, "DIVERGES": 1, "VACUOUS": 1, "INCOMPLETE": 4}


def verdicts_of(folder: Path) -> set[Said]:
    """One element if all files of a folder say the same of its one case."""
    files = [path for path in folder.iterdir() if path.suffix in _READERS]
    assert files, f"{folder} must hold reports"
    return {said for path in files for said in _READERS[path.suffix](path.read_text())}


def in_text(text: str) -> set[Said]:
    """What a terminal shows."""
    first = [line.split()[0] for line in text.splitlines() if line.startswith(_WORDS)]
    return {(_CODES[word], word) for word in first}


def _in_json(text: str) -> set[Said]:
    data = json.loads(text)
    return {(data["exit_code"], case["status"].upper()) for case in data["cases"]}


def _in_junit(text: str) -> set[Said]:
    suite = ElementTree.fromstring(text)
    failed = int(suite.get("failures", "0")) + int(suite.get("errors", "0"))
    elements = len(list(suite.iter("failure"))) + len(list(suite.iter("error")))
    assert failed == elements
    words = [p.get("value", "") for p in suite.iter("property") if p.get("name") == "verdict"]
    return {(1 if failed else 0, word.split()[0]) for word in words}


def _in_html(text: str) -> set[Said]:
    words = re.findall(r'<div class="verdict (\w+)"><strong>(\w+)', text)
    assert words and all(kind == word.lower() for kind, word in words)
    return {(_CODES[word], word) for _, word in words}


_READERS = {".json": _in_json, ".xml": _in_junit, ".txt": in_text, ".html": _in_html}
