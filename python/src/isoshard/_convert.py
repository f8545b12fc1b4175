# SPDX-License-Identifier: Apache-2.0
"""Converts checkpoints of any framework to one safetensors file: `isoshard convert`.

Weights keep their names; optimizer state is called NAME.exp_avg, NAME.exp_avg_sq, NAME.step,
NAME.master and so on, as in bundles. What cannot be converted is printed, and stands in the file's
metadata (isoshard.left_out), so that `isoshard compare --checkpoint` says it, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from . import _pickles, _program
from ._content import add_content
from ._folders import LEFT_OUT, PICKLES, TENSORS_LEFT_OUT, Reading, is_plain, read_folder
from ._safetensors import DTYPES, write_safetensors
from ._stored import Stored
from .errors import CheckpointError, UsageError

_OF_FILES = "file/"  # how patterns of --not-recorded begin that name files

_EPILOG = """\
examples
  python -m isoshard convert x.pt x.safetensors
  python -m isoshard convert runs/step100 step100.safetensors     DCP, Megatron, DeepSpeed
  isoshard compare --checkpoint runs/step100 step100.pt           converts by itself

exit codes: 0 converted, 2 usage, 3 a file is not a checkpoint that is read
"""


def convert(
    source: Path, target: Path, *, trust_pickle: bool = False, weights_only: bool = False
) -> Stored:
    """Writes the checkpoint `source` to the safetensors file `target`; returns what was read.

    Raises CheckpointError, which names the file, for what is malformed, incomplete, in no format
    that is read, or would run code; UsageError if the target is not a safetensors file.
    """
    if target.suffix != ".safetensors":
        raise UsageError(f"The target must be a file *.safetensors, got {target}.")
    stored = read(source, Reading(trust_pickle, weights_only))
    if stored.by_number and not weights_only:
        raise CheckpointError(stored.by_number[0])
    write(stored, source, target, weights_only=weights_only)
    return stored


def write(stored: Stored, source: Path, target: Path, *, weights_only: bool = False) -> None:
    """Writes what was read from `source` to a safetensors file."""
    if weights_only and stored.state:
        number = len(stored.state)
        stored.tensors_left_out.append(f"optimizer state of {number} parameters (--weights)")
        stored.state = {}
    tensors = stored.tensors()
    if not tensors:
        raise CheckpointError(f"{source}: must hold at least one tensor, got none.")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{source}: {name} must have one of the dtypes "
                f"{', '.join(sorted(map(str, DTYPES)))}, got {tensor.dtype}."
            )
    # Wide elements first, so that every tensor is aligned for its dtype.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    lines = {
        LEFT_OUT: [*stored.tensors_left_out, *stored.left_out],
        TENSORS_LEFT_OUT: stored.tensors_left_out,
    }
    metadata = {key: "\n".join(said) for key, said in lines.items() if said} or None
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        write_safetensors(unfinished, [(n, t.detach().contiguous()) for n, t in ordered], metadata)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def read(source: Path, how: Reading) -> Stored:
    """A checkpoint in any of the formats that are read."""
    if not source.exists():
        raise CheckpointError(f"{source} must be a file or folder, got none.")
    if source.is_dir():
        return read_folder(source, how)
    if source.suffix == ".safetensors":
        raise UsageError(f"{source} is a safetensors file already; compare it as it is.")
    stored = Stored()
    content = _pickles.load(source, str(source), how.trust_pickle)
    add_content(stored, content, str(source), weights_only=how.weights_only)
    return stored


def needs_conversion(path: Path, how: Reading) -> bool:
    """Whether isoshard-judge does not read a checkpoint itself, or not as it is to be read."""
    if not path.is_dir():
        return path.suffix in PICKLES and path.exists()
    is_own = (path / "manifest.json").is_file()
    return not is_own and (bool(how.not_read) or not is_plain(path))


def command(words: Sequence[str]) -> int:
    """`isoshard convert SOURCE TARGET`."""
    parser = argparse.ArgumentParser(
        prog="isoshard convert",
        description="Writes a checkpoint of PyTorch, DeepSpeed or Megatron as one safetensors file",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="a file of torch.save, or a checkpoint's folder")
    parser.add_argument("target", type=Path, help="a file *.safetensors, which is replaced")
    parser.add_argument("--weights", action="store_true", help="leave out optimizer state")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="load pickles that name classes of other packages; they can run any code",
    )
    given = parser.parse_args(list(words))
    stored = convert(
        given.source, given.target, trust_pickle=given.trust_pickle, weights_only=given.weights
    )
    states = sum(map(len, stored.state.values()))
    print(f"{given.target}: {len(stored.weights)} weights, {states} optimizer states")
    for line in (*stored.tensors_left_out, *stored.left_out):
        print(f"  not converted: {line}")
    return 0


def compare(words: Sequence[str]) -> int:
    """`isoshard compare --checkpoint A B`: what isoshard-judge does not read is converted first."""
    rest = [word for word in words if word not in ("--trust-pickle", "--weights")]
    how = Reading("--trust-pickle" in words, "--weights" in words, _take_patterns(rest))
    places = _places_of_checkpoints(rest)
    converted: dict[str, str] = {}
    by_number = []
    with tempfile.TemporaryDirectory(prefix="isoshard-") as folder:
        for side, at in zip(("reference", "actual"), places, strict=False):
            source = Path(rest[at])
            by_number.append("")
            if not needs_conversion(source, how):
                continue
            stored = read(source, how)
            by_number[-1] = (stored.by_number or [""])[0]
            target = Path(folder) / side / source.resolve().name / "model.safetensors"
            write(stored, source, target, weights_only=how.weights_only)
            config = (source if source.is_dir() else source.parent) / "config.json"
            if config.is_file():
                shutil.copy(config, target.parent / "config.json")
            rest[at] = str(target.parent)
            converted[rest[at]] = str(source)
        if not how.weights_only and len({bool(why) for why in by_number}) > 1:
            raise CheckpointError(max(by_number))
        rest += ["--made-by", json.dumps([*_program.started_as(), *words])]
        columns = shutil.get_terminal_size((100, 24)).columns
        code, text = _program.call(rest, capture=True, columns=columns)
    for place, name in converted.items():
        text = text.replace(place, name)
    print(text, end="", flush=True, file=sys.stdout if code in (0, 1) else sys.stderr)
    return code


def _take_patterns(words: list[str]) -> list[str]:
    """Takes the patterns of files out of --not-recorded, which the program does not know."""
    taken: list[str] = []
    for at in [i for i, word in enumerate(words) if word == "--not-recorded"][::-1]:
        patterns = words[at + 1].split(",") if at + 1 < len(words) else []
        taken += [p.removeprefix(_OF_FILES) for p in patterns if p.startswith(_OF_FILES)]
        others = [p for p in patterns if not p.startswith(_OF_FILES)]
        words[at : at + 2] = ["--not-recorded", ",".join(others)] if others else []
    return taken


def _places_of_checkpoints(words: Sequence[str]) -> list[int]:
    """Where the two arguments stand among the words: the values of options are none of them."""
    with_value = {
        "--rtol", "--require", "--not-recorded", "--rename", "--output-dir", "--config",
        "--input-dir", "--partial", "--grad-scale", "--mesh", "--reference", "--actual",
    }  # fmt: skip
    places = []
    skips = False
    for at, word in enumerate(words):
        if skips:
            skips = False
        elif word.startswith("--"):
            skips = word in with_value
        elif at > 0:
            places.append(at)
    return places
