# SPDX-License-Identifier: Apache-2.0
"""What the live tests of frameworks share: a kept reference, right runs and planted faults."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from select import select

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "pytorch"
_LIMIT = 900.0  # seconds of one verdict, on a busy machine
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


#: Lines for in front of a Trainer: DDP adds gradients up over its two ranks, for their mean.
DDP_SUMS = (
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook\n"
    "from torch.nn.parallel import DistributedDataParallel as Ddp\n"
    "init = Ddp.__init__\n"
    "def summing(self, *args, **kwargs):\n"
    "    init(self, *args, **kwargs)\n"
    "    self.register_comm_hook(\n"
    "        None, lambda state, bucket: allreduce_hook(state, bucket).then(\n"
    "            lambda f: f.value() * 2))\n"
    "Ddp.__init__ = summing"
)


def needs(*modules: str) -> list[pytest.MarkDecorator]:
    """Marks of a file: live, with isoshard-judge, skipped by name where a module is missing."""
    missing = [m for m in modules if importlib.util.find_spec(m.partition(".")[0]) is None]
    return [
        pytest.mark.live,
        pytest.mark.usefixtures("judge_program"),
        pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} must be installed"),
    ]


def edited(text: str, edits: tuple[Edit, ...]) -> str:
    """The text with each edit made; an edit that fits nowhere would plant nothing."""
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    return text


class Server:
    """A process that calls `isoshard` as often as it is asked to, and imports packages once."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="isoshard-live-"))
        self.log = folder / "judge.log"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment["COLUMNS"] = "100000"
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(self.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )

    def call(self, words: list[str]) -> tuple[int, str]:
        """(exit code, all that was printed)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        if not select([self.process.stdout], [], [], _LIMIT)[0]:
            text = self.log.read_text()
            server.cache_clear()
            self.close()
            raise TimeoutError(f"{words} took more than {_LIMIT} s:\n{text}")
        line = self.process.stdout.readline()
        text = self.log.read_text()
        assert line, f"the process of {words} ended:\n{text}"
        return int(line), text

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.log.parent, ignore_errors=True)


@cache
def server() -> Server:
    """The one of this pytest process."""
    made = Server()
    atexit.register(made.close)
    return made


def serve(log: str) -> None:
    """The process: a list of words in JSON on each line of stdin, an exit code on stdout."""
    from isoshard.cli import main

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
        code = main(json.loads(line))
        sys.stdout.flush()
        print(code, file=answers, flush=True)


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
        kept = str(self.folder / "kept")
        is_first = not self.reference.exists()
        options = ["--output-dir", kept] if is_first else ["--reference", str(self.reference)]
        return self._judge(self.script, mesh, ranks, *options)

    def faulty(
        self, planted: Fault, mesh: str, ranks: int, keep: Path | None = None
    ) -> tuple[int, str]:
        """The script with a fault, against the reference of the right one."""
        if not self.reference.exists():
            self.conforms(mesh, ranks)
        script = f"faulty_{self.script}"
        whole = (self.folder / self.script).read_text()
        (self.folder / script).write_text(edited(whole, planted.edits))
        options = [] if keep is None else ["--output-dir", str(keep)]
        return self._judge(script, mesh, ranks, "--reference", str(self.reference), *options)

    def conforms(self, mesh: str, ranks: int) -> None:
        """The script as it is conforms."""
        code, text = self.right(mesh, ranks)
        assert code == 0, text

    def finds(self, planted: Fault, mesh: str, ranks: int) -> None:
        """The verdict on the script with a fault has its exit code and says its words."""
        code, text = self.faulty(planted, mesh, ranks)
        assert code == planted.code, text
        assert planted.words in text, text

    def _judge(self, script: str, mesh: str, ranks: int, *options: str) -> tuple[int, str]:
        torchrun = str(Path(sys.executable).parent / "torchrun")
        words = ["judge", "--verbose", *self.options, "--mesh", mesh, *options, "--", torchrun]
        words += ["--nproc-per-node", str(ranks), str(self.folder / script), *self.words.split()]
        return server().call(words)


if __name__ == "__main__":
    serve(sys.argv[1])
