# SPDX-License-Identifier: Apache-2.0
"""What a step tells GitHub: annotations, outputs and the page of the job."""

from __future__ import annotations

import os

OK, USAGE, FAILED = 0, 2, 4


def annotate(kind: str, text: str) -> None:
    """Prints a notice, warning or error that GitHub shows with the job."""
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(sign, code)
    print(f"::{kind} title=isoshard::{text}", flush=True)


def append(variable: str, text: str) -> None:
    """Appends to the file that `variable` names, such as GITHUB_OUTPUT; outside of GitHub, none."""
    if file := os.environ.get(variable):
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(text)


def set_output(name: str, value: object) -> None:
    """Sets an output of this step, which must be one line."""
    append("GITHUB_OUTPUT", f"{name}={value}\n")
