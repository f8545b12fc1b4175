# SPDX-License-Identifier: Apache-2.0
"""All tensors in the files of a checkpoint's folder.

One set of files holds the model: its tensors keep their names. Every other file that can hold
tensors is read, too. Its tensors are called by the file, such as adapter_model.0.weight, and those
of a folder inside by that folder. Formats that are not read are compared byte by byte.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from . import _dcp, _pickles, _zero
from ._content import add_content
from ._safetensors import open_safetensors
from ._stored import Stored
from .errors import CheckpointError

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_SAFETENSORS = ".safetensors"
_INDEX = ".index.json"
_FOREIGN = (".distcp", ".gguf", ".h5", ".msgpack", ".nemo", ".npy", ".npz", ".onnx")
_SUFFIXES = (_SAFETENSORS, *PICKLES, *_FOREIGN)
#: Sets of files that hold the model, if they are there; the first one counts.
_MODELS = ("model", "pytorch_model")
#: In the metadata of a file that isoshard convert wrote: what it has left out, one line each.
LEFT_OUT, TENSORS_LEFT_OUT = "isoshard.left_out", "isoshard.tensors_left_out"
_PARTS_OF_DCP = "DCP_SHARDING_INFO"  # in the metadata of a file that holds parts of tensors


@dataclass
class Reading:
    """How a checkpoint is read."""

    trust_pickle: bool = False
    weights_only: bool = False
    not_read: Sequence[str] = ()  # patterns of files below the checkpoint's folder


@dataclass
class _FileSet:
    """Files that hold one thing; with an index, the tensors that it lists for each of them."""

    stem: str
    files: list[Path]
    index: Path | None = None
    names: dict[str, set[str]] = field(default_factory=dict)


def read_folder(folder: Path, how: Reading) -> Stored:
    """All tensors of a checkpoint's folder.

    Raises CheckpointError if no file in it can hold any, and for the first file that is broken.
    """
    stored = Stored()
    _Folders(stored, how, folder).add(folder, "")
    if not stored.weights and not stored.state and not stored.tensors_left_out:
        raise CheckpointError(
            f"{folder}: must be a checkpoint of DCP (.metadata), DeepSpeed (latest, "
            "*_model_states.pt) or Megatron (torch_dist), or hold safetensors or files of "
            f"torch.save, got {sorted(path.name for path in folder.iterdir())[:8]}."
        )
    return stored


def is_plain(folder: Path) -> bool:
    """Whether all tensors of a folder are in the safetensors files that isoshard-judge reads."""
    sets = _sets_in(folder)
    if len(sets) != 1 or {path.suffix for path in sets[0].files} != {_SAFETENSORS}:
        return False
    is_known = sets[0].index is None or sets[0].stem == _MODELS[0]
    inner = (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return is_known and not any(_can_hold(p) for path in inner for p in path.rglob("*"))


class _Folders:
    """Adds the tensors of a folder, and of those inside, to one checkpoint."""

    def __init__(self, stored: Stored, how: Reading, root: Path) -> None:
        self._stored, self._how, self._root = stored, how, root

    def add(self, folder: Path, prefix: str, around: tuple[Path, ...] = ()) -> None:
        here = folder.resolve()
        if here in around:
            return
        used: set[Path] = set()
        pointed = _pointed(folder)
        if pointed is not None:
            self.add(pointed, prefix, (*around, here))
        elif _dcp.is_dcp(folder):
            self._stored.take(_dcp.read(folder, self._how.trust_pickle), prefix)
            used = _dcp.files_of(folder, self._how.trust_pickle)
        elif _zero.is_zero(folder):
            self._stored.take(_zero.read(folder, self._how.trust_pickle), prefix)
            used = set(_zero.files_of(folder))
        elif any(folder.glob("mp_rank_*/model_optim_rng.pt")):
            raise CheckpointError(
                f"{folder}: Megatron's legacy format (model_optim_rng.pt) is not read: nothing in "
                "it says how tensors are cut. Save with --ckpt-format torch_dist."
            )
        has_model = bool(used) or pointed is not None
        self._add_sets(folder, used, prefix, has_model)
        for path in sorted(folder.iterdir()):
            if path.is_dir() and pointed is None and not path.name.startswith("."):
                self.add(path, f"{prefix}{path.name}.", (*around, here))

    def _add_sets(self, folder: Path, used: set[Path], prefix: str, has_model: bool) -> None:
        sets = _sets_in(folder, used)
        main = None if has_model else _main_of(sets)
        for each in [s for s in sets if s is main] + [s for s in sets if s is not main]:
            inner = "" if each is main else f"{each.stem}."
            for path in each.files:
                if self._is_left_out(path):
                    continue
                before = set(self._stored.weights)
                self._add_file(path, prefix + inner, is_main=each is main)
                if each.index is not None and path.suffix not in _FOREIGN:
                    added = self._stored.weights.keys() - before
                    got = {name[len(prefix + inner) :] for name in added}
                    _require_listed(path, each.index, got, each.names[path.name])

    def _is_left_out(self, path: Path) -> bool:
        name = path.relative_to(self._root).as_posix()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self._how.not_read):
            return False
        self._stored.tensors_left_out.append(f"the file {name} (--not-recorded)")
        return True

    def _add_file(self, path: Path, prefix: str, *, is_main: bool) -> None:
        where = str(path)
        if path.suffix == _SAFETENSORS:
            tensors, metadata = open_safetensors(path)
            if _PARTS_OF_DCP in metadata:
                raise CheckpointError(
                    f"{path}: holds parts of tensors ({_PARTS_OF_DCP}). Put them together with "
                    "consolidate_safetensors_files of torch.distributed.checkpoint."
                )
            for name, tensor in tensors.items():
                self._stored.add_weight(prefix + name, tensor, where)
            self._stored.left_out += metadata.get(LEFT_OUT, "").splitlines()
            self._stored.tensors_left_out += metadata.get(TENSORS_LEFT_OUT, "").splitlines()
        elif path.suffix in PICKLES:
            self._add_pickle(path, prefix, is_main=is_main)
        elif path.stat().st_size > 0:
            self._stored.add_weight(prefix + path.suffix[1:], _bytes_of(path), where)

    def _add_pickle(self, path: Path, prefix: str, *, is_main: bool) -> None:
        where = str(path)
        try:
            content = _pickles.load(path, where, self._how.trust_pickle)
        except _pickles.WantsCode as error:
            if is_main:
                raise
            storages = _pickles.storages(path)
            if storages is None:
                raise
            for number, tensor in enumerate(storages):
                self._stored.add_weight(f"{prefix}data.{number}", tensor, where)
            self._stored.left_out.append(
                f"{path.name}: not loaded; the bytes of its {len(storages)} tensors count ({error})"
            )
            return
        if isinstance(content, torch.Tensor) and not is_main:
            content = [content]
        weights_only = self._how.weights_only
        add_content(self._stored, content, where, weights_only=weights_only, prefix=prefix)


def _can_hold(path: Path) -> bool:
    return path.suffix in _SUFFIXES and path.is_file()


def _pointed(folder: Path) -> Path | None:
    """The folder inside that a file names as the newest checkpoint; the others are older ones."""
    iterations = folder / "latest_checkpointed_iteration.txt"
    if not iterations.is_file():
        found = _zero.folder_of(folder)
        return None if found == folder else found
    text = iterations.read_text().strip()
    found = folder / ("release" if text == "release" else f"iter_{text:0>7}")
    if not found.is_dir():
        raise CheckpointError(f"{iterations}: must name an iteration beside it, got {text[:80]!r}.")
    return found


def _sets_in(folder: Path, used: set[Path] | None = None) -> list[_FileSet]:
    """The files of a folder that can hold tensors, those of one index together."""
    files = {path for path in folder.iterdir() if _can_hold(path)} - (used or set())
    sets = []
    for index in sorted(folder.glob(f"*{_INDEX}")):
        if index.with_suffix("").with_suffix("").suffix not in _SUFFIXES:
            continue  # it lists something else
        names = _names_in(index)
        listed = [folder / name for name in sorted(names)]
        sets.append(_FileSet(index.name.split(".")[0], listed, index, names))
        files -= set(listed)
    for path in sorted(files):
        both = [s.index for s in sets if s.index is not None and s.stem == path.stem]
        if both and path.suffix == _SAFETENSORS:
            raise CheckpointError(
                f"{folder}: must hold {path.name} or {both[0].name}, got both. Name the one to "
                "compare."
            )
        stems = [other.stem for other in files]
        is_alone = stems.count(path.stem) == 1 or path.suffix == _SAFETENSORS
        sets.append(_FileSet(path.stem if is_alone else path.name, [path]))
    return sets


def _main_of(sets: Sequence[_FileSet]) -> _FileSet | None:
    """The set that holds the model; None if none stands out."""
    safe = [s for s in sets if s.files[0].suffix == _SAFETENSORS]
    for stem in _MODELS:
        for each in [*safe, *sets]:
            if each.stem == stem:
                return each
    for group in (safe, sets):
        if len(group) == 1:
            return group[0]
    return None


def _names_in(index: Path) -> dict[str, set[str]]:
    """The tensors that an index lists for each file."""
    files: dict[str, set[str]] = {}
    try:
        pairs = list(json.loads(index.read_text())["weight_map"].items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{index}: must be a JSON object with a weight_map from tensor to file. Copy it anew, "
            "or name the files to compare."
        ) from None
    for name, file in pairs:
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{index}: files must lie beside it, got {file!r}.")
        files.setdefault(file, set()).add(name)
    if not files:
        raise CheckpointError(f"{index}: weight_map must name at least one tensor, got none.")
    for file, listed in sorted(files.items()):
        if not (index.parent / file).is_file():
            raise CheckpointError(
                f"{index.parent / file} must be a file, got none; {index.name} lists "
                f"{len(listed)} tensors for it, such as {min(listed)}."
            )
    return files


def _require_listed(path: Path, index: Path, got: set[str], wanted: set[str]) -> None:
    if got != wanted:
        name = min(got ^ wanted)
        lacks = "must hold" if name in wanted else "must not hold"
        raise CheckpointError(
            f"{path}: {lacks} {name}, as {index.name} lists {len(wanted)} tensors for it, got "
            f"{len(got)}. Save the checkpoint anew."
        )


def _bytes_of(path: Path) -> torch.Tensor:
    size = path.stat().st_size
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

