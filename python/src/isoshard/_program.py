# SPDX-License-Identifier: Apache-2.0
"""Finds and calls isoshard-judge, the C++ program that compares bundles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

from .errors import RunError, UsageError

NAME = "isoshard-judge"
VARIABLE = "ISOSHARD_JUDGE"
_TRAINER_VARIABLE = "ISOSHARD_PROGRAM"
_LAUNCHER = "ISOSHARD_LAUNCHER"  # names the script that started this program, if one did
_ONE_LINE = 100_000  # columns


def find() -> Path:
    """The program: named by ISOSHARD_JUDGE, in this package, on PATH, or built in the clone.

    The clone is the one that this package is in, or from whose folder python it was installed.
    """
    given = os.environ.get(VARIABLE)
    if given:
        path = Path(given)
        if not path.is_file():
            raise RunError(f"{VARIABLE} must name the program {NAME}, got {given}.")
        return path
    packaged = Path(__file__).parent / "bin" / NAME
    if packaged.is_file():
        return packaged
    found = shutil.which(NAME)
    if found is not None:
        return Path(found)
    builds = ("build", "build-judge")
    built = [root / build / "bin" / NAME for root in _clones() for build in builds]
    for path in built:
        if path.is_file():
            return path
    places = [str(packaged), *map(str, built)]
    raise RunError(
        f"The program {NAME} must be there, got none on PATH and none at {' or '.join(places)}. "
        f"Build it in the clone (./isoshard verify does), or set {VARIABLE} to its path."
    )


def _clones() -> Iterator[Path]:
    """Clones of the project that this package belongs to."""
    roots = [Path(__file__).resolve().parents[3]]
    try:
        text = metadata.distribution("isoshard").read_text("direct_url.json")
        url = urlparse(json.loads(text or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError):
        url = urlparse("")
    if url.scheme == "file":
        roots.append(Path(unquote(url.path)).parent)
    for root in dict.fromkeys(roots):
        if (root / "isoshard").is_file() and (root / "python" / "pyproject.toml").is_file():
            yield root


def find_trainer() -> Path:
    """The program isoshard: as the environment says, or beside isoshard-judge."""
    given = os.environ.get(_TRAINER_VARIABLE)
    path = Path(given) if given else find().with_name("isoshard")
    if not path.is_file():
        raise UsageError(
            f"--reference ours needs the program isoshard, got none at {path}. Build it "
            f"(./isoshard verify does) and set {_TRAINER_VARIABLE} to its path."
        )
    return path


def started_as() -> list[str]:
    """The words that start this program again from this folder."""
    launcher = os.environ.pop(_LAUNCHER, None)  # it is no setting of what runs below
    if launcher:
        return [launcher]
    name = Path(sys.argv[0]).name
    if name == "__main__.py":
        is_python = shutil.which("python") == sys.executable
        return ["python" if is_python else sys.executable, "-m", "isoshard"]
    return [name if shutil.which(name) == os.path.abspath(sys.argv[0]) else sys.argv[0]]


def call(
    arguments: Sequence[str], *, capture: bool = False, columns: int = _ONE_LINE
) -> tuple[int, str]:
    """Runs the program; returns its exit code and, if captured, its output in lines so long."""
    command = [str(find()), *arguments]
    if not capture:
        return subprocess.run(command, check=False).returncode, ""
    environment = {**os.environ, "COLUMNS": str(columns)}
    # of the user's own command
    for variable in ("QUIET", "VERBOSE", "REPORT", "OUTPUT_DIR"):
        environment.pop(f"ISOSHARD_{variable}", None)
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    return result.returncode, result.stdout + result.stderr


def respond(reference: Path, perturbed: Sequence[Path]) -> None:
    """Writes into a reference how far it moves in perturbed runs, and seals it anew."""
    code, text = call(["respond", str(reference), *map(str, perturbed)], capture=True)
    if code != 0:
        raise RunError(
            f"Perturbed runs must show how far the reference {reference} moves, got exit code "
            f"{code} of {NAME} respond:\n{text.strip()}"
        )
