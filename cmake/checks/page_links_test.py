#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every link of a page to a file of the repository, or to a heading of a page, leads there.

usage: page_links_test.py SOURCE FOLDER

Pages are the Markdown files that git tracks in SOURCE, or all of them where SOURCE is not a clone.
FOLDER is for pages with links that lead nowhere: the check must find each of them.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]*`")


def prose_of(page: pathlib.Path) -> str:
    """The text of a page without blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: pathlib.Path) -> set[str]:
    """The names that headings have in links, as GitHub makes them."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ +(.*?) *$", prose_of(page), re.MULTILINE):
        text = LINK.sub(lambda link: link.group(0)[1 : link.group(0).index("]")], heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (anchor := f"{name}-{number}" if number else name) in anchors:
            number += 1
        anchors.add(anchor)
    return anchors


def problems_of(page: pathlib.Path) -> list[str]:
    """Links of a page that lead nowhere, in words."""
    problems = []
    for target in LINK.findall(CODE.sub("", prose_of(page))):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue  # another site
        file = page.parent / path if path else page
        if not file.exists():
            problems.append(f"{page}: the link {target} must name a file that is there")
        elif anchor and anchor not in anchors_of(file):
            problems.append(f"{page}: the link {target} must name a heading of {file.name}")
    return problems


def pages_of(source: pathlib.Path) -> list[pathlib.Path]:
    """All pages of a source tree."""
    command = ["git", "-C", str(source), "ls-files", "*.md"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    pages = [source / name for name in listed if name]
    return [page for page in pages or sorted(source.rglob("*.md")) if page.is_file()]


def missed_links(folder: pathlib.Path) -> list[str]:
    """What is wrong with the check itself, on pages that are made for it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    other, page = folder / "other.md", folder / "page.md"
    other.write_text("# One `two`, three!\n## Again\n## Again\n```\n# no heading\n```\n")
    good = ["other.md", "other.md#one-two-three", "other.md#again-1", "#here", "https://a.b/c"]
    bad = ["gone.md", "other.md#gone", "other.md#no-heading", "other.md#again-2", "#gone"]
    page.write_text("# Here\n`[code](no.md)`\n```\n[code](no.md)\n```\n")
    with page.open("a", encoding="utf-8") as text:
        text.writelines(f"[a link]({target})\n" for target in good + bad)
    found = problems_of(page)
    if len(found) == len(bad) and all(f" {t} " in p for t, p in zip(bad, found, strict=True)):
        return []
    return [f"the check must find the links {bad}, got:", *found]


def main() -> int:
    """Ends with 1 if a link leads nowhere."""
    source, folder = map(pathlib.Path, sys.argv[1:])
    pages = pages_of(source)
    problems = missed_links(folder)
    if not pages:
        problems.append(f"{source} must have pages, got none")
    for page in pages:
        problems += problems_of(page)
    print("\n".join(problems) if problems else f"the links of {len(pages)} pages lead somewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
