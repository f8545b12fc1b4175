# SPDX-License-Identifier: Apache-2.0
"""The environment: options of this package's commands (--steps is ISOSHARD_STEPS, too), caches."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _extensions
from .errors import UsageError

_PREFIX = "ISOSHARD_"
_LIBRARY = "ISOSHARD_RANKS"  # names libisoshard_ranks.so, so it is not `preflight --ranks`
#: Options of isoshard-judge compare, which `isoshard judge` calls, that it does not have itself.
_OF_JUDGE = frozenset(
    _PREFIX + name
    for name in (  # noqa: SIM905
        "ALLOW_DIFFERENT_ORIGINS ALLOW_DIFFERENT_SETTINGS ALLOW_UNSEALED CONFIG DEVICE REQUIRE RTOL"
    ).split()
)
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_NEAR = 0.8
#: In which precisions a run is judged; the last one is the default.
PRECISIONS = ("native", "float64", "both")
#: Variables that are no options, of the launcher, this package, ranks, tests and tools.
OTHERS = frozenset(
    _PREFIX + name
    for name in (  # noqa: SIM905
        "ATTACHED_TEST AUTO AXE BROWSER BUILD_DIR CALIBRATION_CASES CCACHE CMAKE_ARGS "
        "DEBIAN_MIRROR EXPECTED_HOSTS GOLDEN GPU HOSTS_TEST JOBS JUDGE LAUNCHER LISTED_SUITES "
        "MASTER_PORT MASTER_SOCKET MUTANT MUTANTS_SEEN PROGRAM PYTHON RANKS REQUIRE_GPU RUN_DIR "
        "RUN_ID SKIP_PACKAGES SUDO WHOLE_SUITE WORLD_SIZES"
    ).split()
)


def variable_of(option: str) -> str:
    """--at-steps -> ISOSHARD_AT_STEPS."""
    return _PREFIX + option.removeprefix("--").replace("-", "_").upper()


def chosen_precision(given: str | None) -> str:
    """What a function was given, or else ISOSHARD_PRECISION, or else the default."""
    name = given if given is not None else os.environ.get(variable_of("--precision")) or "both"
    if name not in PRECISIONS:
        raise UsageError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}.")
    return name


def caches_of(folder: Path) -> dict[str, str]:
    """Variables that give the runs of a verdict caches of their own.

    Code that another precision compiled must not run here, nor in the user's own runs later. C++
    extensions know nothing of precisions; runs share those that were built.
    """
    caches = folder / "caches"
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        **_extensions.variables(),
    }


def without_options() -> dict[str, str]:
    """The environment without options of this package's commands, for a program of its own ones."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_PREFIX) or name in OTHERS
    }


def take_defaults(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Gives options that are not among the words the values that variables have.

    A variable that is no option of the parser is an error if its name is nearly that of one. Every
    other one is named on standard error: it may be meant for the program isoshard.
    """
    options = {
        variable_of(name): (name, action)
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and name != "--help"
    }
    for variable, text in environment.items():
        if not variable.startswith(_PREFIX) or not text:
            continue
        if variable in options and variable != _LIBRARY:
            name, action = options[variable]
            if not any(word == name or word.startswith(f"{name}=") for word in words):
                parser.set_defaults(**{action.dest: _value_of(action, variable, text)})
        elif variable not in OTHERS | _OF_JUDGE | {variable_of("--precision")}:
            _refuse_or_tell(parser, variable, list(options))


def _refuse_or_tell(parser: argparse.ArgumentParser, variable: str, known: list[str]) -> None:
    names = [name.removeprefix(_PREFIX) for name in known]
    near = difflib.get_close_matches(variable.removeprefix(_PREFIX), names, 1, _NEAR)
    if near:
        raise UsageError(
            f"A variable of the environment must be an option of {parser.prog}, got {variable}; "
            f"did you mean {_PREFIX}{near[0]}? Set that one, or unset it."
        )
    print(
        f"isoshard: {variable} is set, but {parser.prog} has no such option and ignores it",
        file=sys.stderr,
    )


def _value_of(action: argparse.Action, variable: str, text: str) -> Any:
    if action.nargs == 0:  # a switch
        if text.lower() not in (*_YES, *_NO):
            raise UsageError(f"{variable} must be 1 or 0, got {text!r}.")
        return text.lower() in _YES
    try:
        value = action.type(text) if callable(action.type) else text
    except (TypeError, ValueError):
        raise UsageError(f"{variable} must be a value of its option, got {text!r}.") from None
    if action.choices is not None and value not in action.choices:
        raise UsageError(f"{variable} must be one of {', '.join(action.choices)}, got {text!r}.")
    return [value] if isinstance(action.default, list) else value
