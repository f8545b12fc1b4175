#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks at report pages in a browser, for ctest.

usage: report_pages_test.py PROGRAM FOLDER

PROGRAM (isoshard) makes pages in FOLDER: of a run that diverges, of one that conforms, of training
curves, of a convergence test, of faults, of a benchmark, and goldens. Chromium without a
window loads each in the light and in the dark, on a wide and on a narrow screen, and a script that
is added to a copy of the page says what it sees: what stands on the first screen, whether anything
is wider than the page, and what axe finds (accessibility rules of WCAG 2.1 A and AA). Pages without
a script are drawn and printed as they are. Screenshots stay in FOLDER for people to look at.

Exit code: 0 all is well; 1 not; 77 (a skip for ctest) where there is no browser. axe.min.js is
that of ISOSHARD_AXE, or of the PyPI package axe-playwright-python; without it axe is skipped by
name, and everything else still counts.
"""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

SKIPPED = 77
BROWSERS = ["chromium", "chromium-browser", "google-chrome", "chrome"]
MOST_BYTES = 2_000_000

# What the browser says of a page: written into it, and read back from its DOM.
PROBE = """
const inView = e => { const r = e.getBoundingClientRect(); return r.bottom <= innerHeight; };
const say = axe => {
  const out = document.createElement('pre');
  out.id = 'probe-result';
  out.textContent = JSON.stringify({
    dark: matchMedia('(prefers-color-scheme: dark)').matches,
    width: document.documentElement.scrollWidth, room: innerWidth,
    title: (document.querySelector('.hero strong') || {textContent: ''}).textContent,
    done: (document.querySelector('.hero p') || {textContent: ''}).textContent,
    firstScreen: [...document.querySelectorAll('.hero dt')].filter(e =>
      inView(e.nextElementSibling)).map(e => e.textContent),
    headings: [...document.querySelectorAll('h1,h2,h3')].map(e => e.tagName),
    unnamed: [...document.querySelectorAll('[tabindex],a,summary')].filter(e =>
      !(e.getAttribute('aria-label') || e.textContent.trim())).length,
    broken: [...document.querySelectorAll('a')].filter(e =>
      !document.getElementById(e.getAttribute('href').slice(1))).map(e => e.getAttribute('href')),
    unlabeled: [...document.querySelectorAll('svg')].filter(e =>
      !e.getAttribute('aria-label') && e.getAttribute('aria-hidden') !== 'true').length,
    axe: axe});
  document.body.append(out);
};
document.querySelectorAll('details').forEach(d => d.open = OPEN);
if (typeof axe === 'undefined') say(null);
else axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})
  .then(r => say(r.violations.map(v => v.id + ': ' + v.help + ' at ' +
    v.nodes.slice(0, 3).map(n => n.html.slice(0, 120)).join(' | '))));
"""


# What the first screen of a page says to somebody who has never seen one: what came out, and what
# was done for it.
FIRST_WORDS = {
    "diverges": ("not compute what one process computes", "ran in one process and sharded"),
    "conforms": ("It is as it should be", "ran in one process and sharded"),
    "curves": ("as it should be", "losses were compared step by step"),
    "bench": ("Measured", "Training steps were timed"),
    "faults": ("All 2 mistakes were found", "put into a right implementation on purpose"),
    "converge": ("as they should be", "losses were compared step by step"),
    "golden": ("as in the accepted runs", "stored when they were accepted"),
}


@dataclasses.dataclass
class Screen:
    """How a page is looked at."""

    name: str
    width: int
    height: int
    is_dark: bool
    is_open: bool  # whether all details are unfolded


SCREENS = [
    Screen("light", 1280, 800, is_dark=False, is_open=False),
    Screen("dark", 1280, 800, is_dark=True, is_open=True),
    Screen("phone", 480, 900, is_dark=False, is_open=True),
]


def find_browser() -> str | None:
    """ISOSHARD_BROWSER, or the first one on the path."""
    named = os.environ.get("ISOSHARD_BROWSER")
    if named:
        return shutil.which(named) or sys.exit(
            f"ISOSHARD_BROWSER must be a browser, got {named}, which is not there"
        )
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def find_axe() -> str | None:
    """The text of axe.min.js."""
    named = os.environ.get("ISOSHARD_AXE")
    if named:
        return pathlib.Path(named).read_text(encoding="utf-8")
    package = importlib.util.find_spec("axe_playwright_python")
    if package is None or not package.submodule_search_locations:
        return None
    return (pathlib.Path(package.submodule_search_locations[0]) / "axe.min.js").read_text(
        encoding="utf-8"
    )


class Browser:
    """Chromium without a window."""

    def __init__(self, program: str, folder: pathlib.Path) -> None:
        self.command = [
            program,
            "--headless",
            "--no-sandbox",  # pages of this test alone are loaded
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-extensions",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing from the network
        ]

    def run(self, screen: Screen, page: pathlib.Path, *more: str) -> str:
        """What it prints."""
        scheme = 0 if screen.is_dark else 1
        done = subprocess.run(
            [
                *self.command,
                f"--blink-settings=preferredColorScheme={scheme}",
                f"--window-size={screen.width},{screen.height}",
                *more,
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the browser ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def probe(self, screen: Screen, page: pathlib.Path, axe: str | None) -> dict:
        """What a script in a copy of the page sees."""
        script = PROBE.replace("OPEN", "true" if screen.is_open else "false")
        text = page.read_text(encoding="utf-8")
        added = f"<script>{axe}</script>" if axe else ""
        added += f"<script>{script}</script></body>"
        copy = page.with_name(f"{page.stem}.{screen.name}.probe.html")
        copy.write_text(text.replace("</body>", added), encoding="utf-8")
        dom = self.run(screen, copy, "--virtual-time-budget=120000", "--dump-dom")
        copy.unlink()
        found = re.search(r'<pre id="probe-result">(.*?)</pre>', dom, re.DOTALL)
        if found is None:
            raise RuntimeError(f"the script said nothing on {page.name}, {screen.name}")
        return json.loads(html.unescape(found.group(1)))


def make_pages(program: str, folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Pages of real runs."""

    def page(name: str, code: int, *arguments: str) -> pathlib.Path:
        path = folder / f"{name}.html"
        command = [program, *arguments, "--report", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != code:
            raise RuntimeError(f"{command} must end with {code}, got {done.returncode}: {done}")
        return path

    small = ["--preset", "small", "--dtype", "fp32"]
    return {
        "diverges": page("diverges", 1, "verify", "--fault", "mlp_input_grad_partial"),
        "conforms": page(
            "conforms", 0, "verify", *small, "--subjects", "nd", "--pp", "2", "--tp", "2",
            "--dp", "1", "--micro-batches", "4",
        ),
        "curves": page(
            "curves", 0, "train", *small, "--subjects", "reference,ddp", "--steps", "12"
        ),
        "bench": page(
            "bench", 0, "bench", "--impl", "nd", "--model", "tiny", "--pp", "2", "--dp", "2",
            "--seq_length", "16", "--num_training_steps", "6", "--warmup_steps", "1",
            "--output-dir", str(folder / "results"),
        ),
        "faults": page("faults", 0, "faults", "dp_sum_missing", "mlp_input_grad_partial"),
        "converge": page(
            "converge", 0, "converge", "--test", "tp=2", "--steps", "8", "--perturbed-runs", "2",
            "--dp", "2",
        ),
        "golden": page("golden", 0, "golden", "verify", "lattice_*"),
    }


def problems_of(name: str, screen: Screen, seen: dict) -> list[str]:
    """What is wrong with what the browser saw."""
    problems = []
    if seen["dark"] != screen.is_dark:
        problems.append("the browser did not take the color scheme that the test asked for")
    if seen["width"] > seen["room"]:
        problems.append(f"it is {seen['width']} pixels wide, where {seen['room']} are there")
    if name == "diverges" and screen.name != "phone":
        for row in ["What broke", "Likely cause", "Where", "What to look at", "Repeat it"]:
            if row not in seen["firstScreen"]:
                problems.append(f"'{row}' is not on the first screen, got {seen['firstScreen']}")
    if name == "bench" and "Speed" not in seen["firstScreen"]:
        problems.append(f"the speed is not on the first screen, got {seen['firstScreen']}")
    title, done = FIRST_WORDS[name]
    if title not in seen["title"] or done not in seen["done"]:
        problems.append(f"it must begin with '{title}' and '{done}', got {seen['title']}: "
                        f"{seen['done']}")
    if seen["headings"].count("H1") != 1 or seen["headings"][0] != "H1":
        problems.append(f"it must begin with its one h1, got {seen['headings'][:5]}")
    for what in ["unnamed", "unlabeled"]:
        if seen[what]:
            problems.append(f"{seen[what]} elements are {what}")
    if seen["broken"]:
        problems.append(f"links lead nowhere: {seen['broken']}")
    return problems + [f"axe: {line}" for line in seen["axe"] or []]


def main() -> int:
    program, folder = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    found = find_browser()
    if found is None:
        print(f"SKIPPED: none of {', '.join(BROWSERS)}; install chromium or set ISOSHARD_BROWSER")
        return SKIPPED
    axe = find_axe()
    if axe is None:
        print("axe is skipped: pip install axe-playwright-python, or set ISOSHARD_AXE")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    browser = Browser(found, folder)
    failures = 0
    for name, page in make_pages(program, folder).items():
        size = page.stat().st_size
        print(f"{name}: {size} bytes")
        if size >= MOST_BYTES or "<script" in page.read_text(encoding="utf-8"):
            print(f"  FAILED: it must be below {MOST_BYTES} bytes and have no script")
            failures += 1
        for screen in SCREENS:
            image = folder / f"{name}.{screen.name}.png"
            browser.run(screen, page, f"--screenshot={image}")
            for problem in problems_of(name, screen, browser.probe(screen, page, axe)):
                print(f"  FAILED ({screen.name}): {problem}")
                failures += 1
        printed = folder / f"{name}.pdf"
        browser.run(SCREENS[0], page, f"--print-to-pdf={printed}", "--no-pdf-header-footer")
        if printed.read_bytes()[:5] != b"%PDF-":
            print("  FAILED: it cannot be printed")
            failures += 1
    print(f"screenshots: {folder}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
