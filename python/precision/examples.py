# SPDX-License-Identifier: Apache-2.0
"""The scripts of examples/pytorch, by the commands of their second lines."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[2] / "examples" / "pytorch"
#: Further command lines of the same scripts.
_MORE = {
    "fsdp2.py": ("--nproc-per-node 2 fsdp2.py",),
    "deepspeed_zero.py": ("--zero 1", "--zero 2"),
    "deepspeed_autotp.py": ("--tp 2 --bf16",),
    "megatron_gpt.py": ("2", "2 zero", "2 sp"),
    "ring_attention.py": ("--contiguous",),
    "peft_lora.py": ("--wrap fsdp2",),
}


def commands(
    folder: Path, options: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """(name, further columns, words of isoshard judge)."""
    for path in sorted(_FOLDER.glob("*.py")):
        line = path.read_text().splitlines()[1]
        match = re.match(r"# isoshard judge (.*?)(?:    +\(.*| \[--.*)?$", line)
        if match is None:
            continue
        text = match[1].replace("THIS_FILE", path.name)
        before, _, after = text.partition(path.name)
        yield text, {}, _words(before, path, after)
        for given in _MORE.get(path.name, ()):
            if path.name in given:
                launcher = f"-- torchrun {given.partition(path.name)[0]}"
                yield given, {}, _words(launcher, path, "")
            else:
                yield f"{before}{path.name} {given}", {}, _words(before, path, given)


def _words(before: str, path: Path, after: str) -> list[str]:
    words = [*shlex.split(before), str(path), *shlex.split(after)]
    at = words.index("--") + 1
    words[at] = str(Path(sys.executable).parent / words[at])
    return words
