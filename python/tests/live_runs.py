# SPDX-License-Identifier: Apache-2.0
"""What the live tests of frameworks share: a kept reference, right runs and planted faults."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "pytorch"
#: A text of the script, and what stands in its place.
Edit = tuple[str, str]


@dataclass(frozen=True)
class Fault:
    """A planted bug: edits of the script, and words of the verdict that only it explains."""

    edits: tuple[Edit, ...]
    words: str
    code: int = 1


def fault(old: str, new: str, words: str, code: int = 1) -> Fault:
    """A fault of one edit."""
    return Fault(((old, new),), words, code)


def before(place: str, lines: str, words: str, code: int = 1) -> Fault:
    """A fault that puts lines in front of a place of the script."""
    return fault(place, f"{lines}\n{place}", words, code)


def needs(*modules: str) -> list[pytest.MarkDecorator]:
    """Marks of a file: live, with isoshard-judge, skipped by name where a module is missing."""
    missing = [m for m in modules if importlib.util.find_spec(m.partition(".")[0]) is None]
    return [
        pytest.mark.live,
        pytest.mark.usefixtures("judge_program"),
        pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} must be installed"),
    ]


def judge(folder: Path, script: str, ranks: int, words: str, *options: str) -> tuple[int, str]:
    """Judges a script of a folder; (exit code, all that was printed)."""
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [sys.executable, "-m", "isoshard", "judge", *options, "--", torchrun]
    command += ["--nproc-per-node", str(ranks), script, *words.split()]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=500,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """The text with each edit made; an edit that fits nowhere would plant nothing."""
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


class Runs:
    """Runs of one example with one list of arguments; the reference is made once."""

    def __init__(
        self, folder: Path, script: str, words: str, edits: tuple[Edit, ...] = (), *options: str
    ) -> None:
        self.folder, self.script, self.words, self.options = folder, script, words, options
        for path in EXAMPLES.glob("*.py"):
            shutil.copy(path, folder / path.name)
        (folder / script).write_text(edited((folder / script).read_text(), edits))
        self.reference = folder / "kept" / "reference"

    def right(self, mesh: str, ranks: int) -> tuple[int, str]:
        """The script as it is. The first call makes the reference, too."""
        options = [*self.options, "--mesh", mesh]
        if self.reference.exists():
            options += ["--reference", str(self.reference)]
        else:
            options += ["--output-dir", str(self.folder / "kept")]
        return judge(self.folder, self.script, ranks, self.words, *options)

    def faulty(self, planted: Fault, mesh: str, ranks: int) -> tuple[int, str]:
        """The script with a fault, against the reference of the right one."""
        if not self.reference.exists():
            code, text = self.right(mesh, ranks)
            assert code == 0, text
        script = f"faulty_{self.script}"
        whole = (self.folder / self.script).read_text()
        (self.folder / script).write_text(edited(whole, planted.edits))
        options = [*self.options, "--mesh", mesh, "--reference", str(self.reference)]
        return judge(self.folder, script, ranks, self.words, *options)
