# SPDX-License-Identifier: Apache-2.0
"""The reference command of a script that draws a batch for each process."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from . import _launch
from ._data import Finding
from .errors import UsageError

_IS_BATCH = re.compile(r"--?[a-z][\w-]*batch[\w-]*|--?batch[\w-]*|-b", re.IGNORECASE)
_DEFINES = re.compile(r"""add_argument\(\s*["'](--[\w-]*batch[\w-]*)["']""", re.IGNORECASE)


def refuse_own_batches(
    findings: Sequence[Finding], command: Sequence[str], degree: int, has_reference: bool
) -> None:
    """Raises if each data-parallel rank draws as many samples as the single process, and others.

    Then the single process must draw the samples of all ranks before anything can be compared.
    """
    own = next((f for f in findings if f.samples is not None), None)
    if own is None or own.samples is None:
        return
    wanted = own.samples * degree
    text = (
        f"The single process must train on the {wanted} samples that {degree} data-parallel ranks "
        f"draw in a step, got {own.samples} ({own.name}, step {own.step}): the script draws "
        f"{own.samples} for each process. "
    )
    if has_reference:
        raise UsageError(f"{text}Record the reference with a batch size of {wanted}.")
    words = with_batch_of(command, own.samples, degree)
    if words is None:
        raise UsageError(
            f"{text}Judge with --replay, which gives the single process these samples. Or let the "
            "script take its batch size as an argument, and give --reference-command a command "
            f"with {wanted} in place of {own.samples}, such as --reference-command "
            f"'python train.py --batch-size {wanted}'."
        )
    raise UsageError(
        f"{text}Give --reference-command {shlex.quote(shlex.join(words))}. Or judge with --replay, "
        "which gives the single process these samples."
    )


def with_batch_of(command: Sequence[str], samples: int, degree: int) -> list[str] | None:
    """The script in one process with `degree` times its batch size; None: it has no such option.

    Of options that name a batch the one counts whose number is `samples`.
    """
    script, arguments = _launch.script_of(command)
    if not script:
        return None
    options = _batch_options(arguments)
    if options:
        found = next((o for o in options if o[1] == samples), None)
        if found is None:  # such as --num-batches
            return None
        at, value, words = found
        arguments[at] = words.format(value * degree)
    else:
        defined = _option_of_script(script[-1])
        if defined is None:
            return None
        arguments += [defined, str(samples * degree)]
    return ["python", *script, *arguments]


def _batch_options(arguments: Sequence[str]) -> list[tuple[int, int, str]]:
    """Index of the word with the number, the number, and the word with a place for another one."""
    found = []
    for i, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if _IS_BATCH.fullmatch(name) is None:
            continue
        if equals and value.isdecimal():
            found.append((i, int(value), name + "={}"))
        elif not equals and i + 1 < len(arguments) and arguments[i + 1].isdecimal():
            found.append((i + 1, int(arguments[i + 1]), "{}"))
    return found


def _option_of_script(script: str) -> str | None:
    """The first option of a script's argparse that names a batch."""
    try:
        found = _DEFINES.search(Path(script).read_text())
    except (OSError, UnicodeDecodeError):
        return None
    return found.group(1) if found is not None else None
