# SPDX-License-Identifier: Apache-2.0
"""Reads distributed checkpoints of PyTorch, and those of Megatron-Core (torch_dist), which are
such, without a process group: the metadata say which file holds which box of which tensor.
"""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import Any

import torch

from . import _pickles
from ._stored import Stored
from .errors import CheckpointError

#: What the first part of a key is called where it holds nothing but the model, or the optimizer.
_MODELS = ("model", "module", "state_dict", "app")
_OPTIMIZERS = ("optim", "optimizer", "optimizers")
#: Megatron's names of states, which stand before the parameter's: ours.
_MEGATRON_STATES = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "fp32_param": "master",
    "param": "master",
    "momentum_buffer": "momentum_buffer",
    "step": "step",
}


def is_dcp(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint."""
    return (folder / ".metadata").is_file()


def read(folder: Path, trust_pickle: bool) -> Stored:
    """All tensors of the folder, put together; other values are listed as left out."""
    metadata = _pickles.load_metadata(folder / ".metadata", trust_pickle)
    stored = Stored()
    files = _Files(folder, trust_pickle)
    places: dict[str, list[Any]] = {}
    for index, info in (getattr(metadata, "storage_data", None) or {}).items():
        places.setdefault(index.fqn, []).append((index, info))
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    others = []
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            others.append(key)
            continue
        tensor = _whole(folder, key, entry, places.get(key, []), files)
        _add(stored, folder, key, tuple(map(str, paths.get(key, (key,)))), tensor)
    if others:
        stored.left_out.append(f"{len(others)} values that are not tensors: {', '.join(others)}")
    return stored


def files_of(folder: Path, trust_pickle: bool) -> set[Path]:
    """The files that the metadata name."""
    metadata = _pickles.load_metadata(folder / ".metadata", trust_pickle)
    places = (getattr(metadata, "storage_data", None) or {}).values()
    return {folder / info.relative_path for info in places}


class _Files:
    """The open files of a checkpoint."""

    def __init__(self, folder: Path, trust_pickle: bool) -> None:
        self._folder = folder
        self._trust_pickle = trust_pickle

    def tensor(self, key: str, info: Any) -> torch.Tensor:
        """The tensor of one box."""
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{self._folder}: {key} is stored with {', '.join(info.transform_descriptors)}, "
                "which is not read. Save it without extensions."
            )
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(
                f"{self._folder / '.metadata'}: a file must be a name in the same folder, got "
                f"{info.relative_path}."
            )
        path = self._folder / info.relative_path
        if not path.is_file():
            raise CheckpointError(f"{path}: is missing; it must hold a part of {key}.")
        if info.offset + info.length > path.stat().st_size:
            raise CheckpointError(
                f"{path}: must hold {info.length} bytes of {key} at {info.offset}, got a file of "
                f"{path.stat().st_size} bytes."
            )
        with path.open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        tensor = _pickles.load(io.BytesIO(data), f"{path} ({key})", self._trust_pickle)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path}: {key} must be a tensor, got {type(tensor).__name__}.")
        return tensor


def _whole(folder: Path, key: str, entry: Any, places: list[Any], files: _Files) -> torch.Tensor:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    whole = torch.zeros(shape, dtype=dtype)
    by_offset = {tuple(index.offset or ()): info for index, info in places}
    if len(by_offset) < len(places):
        raise CheckpointError(f"{folder}: two parts of {key} begin at the same place.")
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    _require_tiling(folder, key, shape, boxes)
    for offsets, sizes in boxes:
        if offsets not in by_offset:
            raise CheckpointError(
                f"{folder / '.metadata'}: names no file for the part of {key} at {list(offsets)}."
            )
        part = files.tensor(key, by_offset[offsets])
        if part.dtype != dtype or part.numel() != math.prod(sizes):
            raise CheckpointError(
                f"{folder / by_offset[offsets].relative_path}: the part of {key} at "
                f"{list(offsets)} must be {dtype} {list(sizes)}, got {part.dtype} "
                f"{list(part.shape)}."
            )
        if not whole.shape:
            whole.copy_(part.reshape(()))
        elif part.numel():
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            whole[box].copy_(part.reshape(sizes))
    return whole


def _require_tiling(
    folder: Path,
    key: str,
    shape: tuple[int, ...],
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """Every element lies in exactly one box."""
    times = torch.zeros(shape, dtype=torch.uint8)
    inside = True
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            inside = False
            continue
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        part = times[box]
        inside = inside and min(offsets, default=0) >= 0 and tuple(part.shape) == sizes
        part += (part < 2).to(torch.uint8)
    if not inside or not bool((times == 1).all()):
        raise CheckpointError(
            f"{folder / '.metadata'}: the {len(boxes)} parts of {key} must cover {list(shape)} "
            f"without gap or overlap; {int((times == 0).sum())} elements are in none, "
            f"{int((times > 1).sum())} in several."
        )


def _add(
    stored: Stored, folder: Path, key: str, path: tuple[str, ...], tensor: torch.Tensor
) -> None:
    """Puts a tensor where its key says: a weight, or a state of one."""
    megatron = re.fullmatch(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\.(.+)", key)
    if len(path) == 1 and megatron is not None and megatron.group(1) in _MEGATRON_STATES:
        state = _MEGATRON_STATES[megatron.group(1)]
        stored.add_state(_without_model(megatron.group(2)), state, tensor, str(folder))
        return
    if len(path) == 1:
        of_optimizer = re.fullmatch(r"(?:(?:optim|optimizers?)\.)?state\.(.+)\.([^.]+)", key)
        if of_optimizer is not None:
            stored.add_state(of_optimizer.group(1), of_optimizer.group(2), tensor, str(folder))
            return
        if key.split(".")[0] in _OPTIMIZERS:
            stored.add_weight(key, tensor, str(folder))
            return
        stored.add_weight(_without_model(key), tensor, str(folder))
        return
    if "state" in path[:-2]:
        at = path.index("state")
        is_alone = at == 0 or any(part in _OPTIMIZERS for part in path[:at])
        name = path[at + 1] if is_alone else ".".join((*path[:at], path[at + 1]))
        stored.add_state(name, ".".join(path[at + 2 :]), tensor, str(folder))
    elif path[0] in _OPTIMIZERS or "param_groups" in path:
        flat = re.fullmatch(r"(?:.*\.)?state\.(.+)\.([^.]+)", ".".join(path))
        if flat is None:
            stored.add_weight(".".join(path), tensor, str(folder))
        else:
            stored.add_state(flat.group(1), flat.group(2), tensor, str(folder))
    else:
        stored.add_weight(".".join(path[1:] if path[0] in _MODELS else path), tensor, str(folder))


def _without_model(key: str) -> str:
    head, _, rest = key.partition(".")
    return rest if rest and head in ("model0", "model") else key
