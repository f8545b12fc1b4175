#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws captured program output as an SVG image of a terminal.

usage: tools/render_report.py TEXT SVG [--columns 100]

TEXT is what the program printed. Lines that begin with '# ' are notes about the capture and are
not drawn, lines that begin with '$ ' are commands, and a line '...' stands for lines left out.
Longer lines are wrapped with a hanging indent. The same text gives the same bytes.

Colors follow the words of the reports: CONFORMS, DIVERGES, '<-- not within', 'likely cause'.
"""

import argparse
import html
import re
import textwrap

CHARACTER_WIDTH = 7.8
LINE_HEIGHT = 17.5
MARGIN = 18.0
FONT = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
BACKGROUND = "#0d1117"
PLAIN = "#c9d1d9"
DIM = "#8b949e"
GREEN = "#3fb950"
RED = "#ff7b72"
YELLOW = "#e3b341"
BLUE = "#79c0ff"


def wrapped(line, columns):
    """The line as lines of at most `columns` characters, continued under its own indent."""
    if len(line) <= columns:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(
        line,
        columns,
        subsequent_indent=indent,
        break_long_words=True,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )


def style_of(line):
    """Color and weight of a line of output, before wrapping."""
    if line.startswith("$ "):
        return BLUE, "bold"
    if line.startswith(("CONFORMS", "PASS")) or re.match(r"\d+ of \d+ cases? conform", line):
        return (RED if line.startswith("0 of") else GREEN), "bold"
    if line.startswith(("DIVERGES", "INCOMPLETE", "VACUOUS")) or "not within" in line:
        weight = "bold" if line.startswith("D") else "normal"
        return RED, weight
    if line.lstrip().startswith("likely cause:"):
        return YELLOW, "bold"
    if line.strip() == "..." or "norms and errors" in line:
        return DIM, "normal"
    return PLAIN, "normal"


def columns_of(line):
    """The line's pieces, each placed at its own column whatever font is found."""
    pieces = []
    for match in re.finditer(r"\S+(?: \S+)*", line):
        x = MARGIN + match.start() * CHARACTER_WIDTH
        length = len(match.group()) * CHARACTER_WIDTH
        pieces.append(
            f'<tspan x="{x:g}" textLength="{length:g}" lengthAdjust="spacingAndGlyphs">'
            f"{html.escape(match.group())}</tspan>"
        )
    return "".join(pieces)


def svg_of(text, columns):
    """The whole image."""
    rows = []
    for line in text.splitlines():
        if line.startswith("# "):
            continue
        color, weight = style_of(line)
        rows += [(part, color, weight) for part in wrapped(line, columns) or [""]]
    width = 2 * MARGIN + columns * CHARACTER_WIDTH
    height = 2 * MARGIN + len(rows) * LINE_HEIGHT
    commands = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:g}"'
        f' height="{height:g}" viewBox="0 0 {width:g} {height:g}">',
        f"<title>Output of: {html.escape('; '.join(commands))}</title>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
        f'<g font-family="{FONT}" font-size="13">',
    ]
    for number, (part, color, weight) in enumerate(rows):
        if not part.strip():
            continue
        y = MARGIN + (number + 0.75) * LINE_HEIGHT
        out.append(
            f'<text y="{y:g}" fill="{color}" font-weight="{weight}">{columns_of(part)}</text>'
        )
    out += ["</g>", "</svg>", ""]
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="captured output")
    parser.add_argument("svg", help="file to write")
    parser.add_argument("--columns", type=int, default=100, help="wrap longer lines here")
    options = parser.parse_args()
    with open(options.text, encoding="utf-8") as stream:
        text = stream.read()
    with open(options.svg, "w", encoding="utf-8") as stream:
        stream.write(svg_of(text, options.columns))


if __name__ == "__main__":
    main()
