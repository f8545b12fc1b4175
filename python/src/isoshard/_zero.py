# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints of DeepSpeed: its stages of ZeRO cut flat buffers, this joins them again.

Stages 1 and 2: each rank's file says which run of its flat partition belongs to which parameter
(param_slice_mappings); a parameter is its runs in the order of ranks. Stage 3: every parameter is
cut into equal parts, the last one padded, and each rank has its parts one after the other, in the
order of param_shapes.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from . import _pickles
from ._content import add_content, leave_out_settings
from ._stored import Stored
from .errors import CheckpointError

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_WITHOUT_TENSORS = ("buffer_names", "ds_config", "ds_version", "frozen_param_shapes")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


def folder_of(folder: Path) -> Path | None:
    """The folder that holds the files: `folder`, or the tag in it that the file latest names."""
    if is_zero(folder):
        return folder
    latest = folder / "latest"
    if not latest.is_file():
        return None
    tag = latest.read_text().strip()
    if not tag or Path(tag).name != tag or not (folder / tag).is_dir():
        raise CheckpointError(f"{latest}: must name a folder beside it, got {tag[:80]!r}.")
    return folder / tag


def is_zero(folder: Path) -> bool:
    """Whether a folder holds the files of all ranks."""
    return any(_MODEL_FILE.fullmatch(path.name) for path in folder.iterdir())


def files_of(folder: Path) -> list[Path]:
    """Those files."""
    patterns = (_MODEL_FILE, _OPTIMIZER_FILE)
    return [p for p in folder.iterdir() if any(pattern.fullmatch(p.name) for pattern in patterns)]


def read(folder: Path, trust_pickle: bool) -> Stored:
    """All weights and optimizer states of a folder that folder_of gave."""
    models = _files(folder, _MODEL_FILE)
    optimizers = _files(folder, _OPTIMIZER_FILE)
    if any(path.name.startswith("layer_") for path in folder.iterdir()):
        raise CheckpointError(
            f"{folder}: pipeline stages (layer_*) are not read: nothing in them says what the "
            "layers are called. Save the model's own state dict beside them."
        )
    first = models[0]
    model = _load(first, trust_pickle)
    for field in ("module", "param_shapes"):
        if field not in model:
            raise CheckpointError(f"{first}: must have the field {field}, got {sorted(model)}.")
    stored = Stored()
    kept = {"module", "param_shapes", "optimizer", "frozen_param_fragments", *_WITHOUT_TENSORS}
    if optimizers:
        parts = [_load(path, trust_pickle)["optimizer_state_dict"] for path in optimizers]
        _require_all_ranks(folder, parts, optimizers)
        stage = int(parts[0]["zero_stage"])
        states = (
            _join_stage_3(models, model, parts, optimizers, trust_pickle)
            if stage == 3
            else _join_stages_1_and_2(model, parts, optimizers)
        )
        _add_states(stored, states, first)
        leave_out_settings(stored, _base(parts[0]).get("param_groups", []))
    else:
        kept.discard("optimizer")
    _add_weights(stored, model, first)
    add_content(stored, {k: v for k, v in model.items() if k not in kept}, str(first))
    return stored


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    found = {}
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match.group(2)) != 0:
            raise CheckpointError(
                f"{path}: model-parallel checkpoints are not read: nothing in them says how "
                "tensors are cut. Save a consolidated state dict."
            )
        found[int(match.group(1) or 0)] = path
    for rank in range(max(found, default=-1) + 1):
        if rank not in found:
            raise CheckpointError(f"{folder}: the file of rank {rank} is missing, got {found}.")
    return [found[rank] for rank in sorted(found)]


def _load(path: Path, trust_pickle: bool) -> dict[str, Any]:
    content = _pickles.load(path, str(path), trust_pickle)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a dictionary, got {type(content).__name__}.")
    return content


def _require_all_ranks(folder: Path, parts: list[dict[str, Any]], files: list[Path]) -> None:
    for part, path in zip(parts, files, strict=True):
        count = part.get("partition_count")
        counts = set(count) if isinstance(count, (list, tuple)) else {count}
        if counts != {len(files)}:
            raise CheckpointError(
                f"{path}: says that there are {sorted(map(str, counts))} partitions, but {folder} "
                f"has the files of {len(files)} ranks. Copy the missing ones."
            )


def _base(part: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the optimizer that steps the flat partitions."""
    base = part.get("base_optimizer_state", part.get("optimizer_state_dict"))
    return base if isinstance(base, dict) else {"state": {}}


def _flat_states(part: dict[str, Any], key: str, path: Path) -> list[dict[str, torch.Tensor]]:
    """By group: the master and each state that has its elements; numbers as they are."""
    base = _base(part).get("state", {})
    groups = []
    for index, master in enumerate(part[key]):
        states = {"master": master.reshape(-1)}
        for name, value in dict(base.get(index, {})).items():
            tensor = torch.as_tensor(value)
            if tensor.numel() not in (1, master.numel()):
                raise CheckpointError(
                    f"{path}: {name} of group {index} must have the {master.numel()} elements of "
                    f"its weights, got {tensor.numel()}."
                )
            states[name] = tensor.reshape(-1) if name != "step" else tensor
        groups.append(states)
    return groups


def _join_stages_1_and_2(
    model: dict[str, Any], parts: list[dict[str, Any]], files: list[Path]
) -> dict[str, dict[str, torch.Tensor]]:
    shapes = {
        name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()
    }
    runs: dict[str, dict[str, list[torch.Tensor]]] = {name: {} for name in shapes}
    for part, path in zip(parts, files, strict=True):
        if "param_slice_mappings" not in part:
            raise CheckpointError(
                f"{path}: must have param_slice_mappings, which says where parameters lie. Save "
                "it with a newer DeepSpeed."
            )
        groups = _flat_states(part, "single_partition_of_fp32_groups", path)
        for states, mapping in zip(groups, part["param_slice_mappings"], strict=True):
            for name, fragment in mapping.items():
                if name not in runs:
                    raise CheckpointError(f"{path}: has {name}, which param_shapes lacks.")
                for state, flat in states.items():
                    run = flat
                    if state != "step":
                        run = flat.narrow(0, int(fragment.start), int(fragment.numel))
                    runs[name].setdefault(state, []).append(run)
    return {
        name: {
            state: pieces[0]
            if state == "step"
            else _joined(name, state, pieces, shapes[name], files)
            for state, pieces in states.items()
        }
        for name, states in runs.items()
    }


def _joined(
    name: str, state: str, pieces: list[torch.Tensor], shape: tuple[int, ...], files: list[Path]
) -> torch.Tensor:
    whole = torch.cat(pieces)
    if whole.numel() != math.prod(shape):
        raise CheckpointError(
            f"{files[0].parent}: the ranks must have the {math.prod(shape)} elements of "
            f"{name}.{state}, got {whole.numel()}."
        )
    return whole.reshape(shape)


def _join_stage_3(
    models: list[Path],
    model: dict[str, Any],
    parts: list[dict[str, Any]],
    files: list[Path],
    trust_pickle: bool,
) -> dict[str, dict[str, torch.Tensor]]:
    ranks = len(parts)
    flat: dict[str, list[torch.Tensor]] = {}
    steps: list[torch.Tensor] = []
    for part, path in zip(parts, files, strict=True):
        groups = _flat_states(part, "fp32_flat_groups", path)
        steps += [states["step"] for states in groups if "step" in states]
        for state in groups[0]:
            if state != "step":
                flat.setdefault(state, []).append(torch.cat([group[state] for group in groups]))
    if len({float(step) for step in steps}) > 1:
        raise CheckpointError(f"{files[0].parent}: all parts must have been stepped as often.")
    result: dict[str, dict[str, torch.Tensor]] = {}
    begin = 0
    for name, size in ((n, s) for group in model["param_shapes"] for n, s in group.items()):
        shape = tuple(size)
        numel = math.prod(shape)
        share = math.ceil(numel / ranks)
        result[name] = {}
        for state, by_rank in flat.items():
            if any(begin + share > of_rank.numel() for of_rank in by_rank):
                raise CheckpointError(f"{files[0].parent}: {state} ends inside of {name}.")
            pieces = [of_rank.narrow(0, begin, share) for of_rank in by_rank]
            result[name][state] = torch.cat(pieces)[:numel].reshape(shape)
        if steps:
            result[name]["step"] = steps[0]
        begin += share
    for state, by_rank in flat.items():
        if any(of_rank.numel() != begin for of_rank in by_rank):
            raise CheckpointError(
                f"{files[0].parent}: {begin} elements of {state} belong to parameters on each "
                f"rank, got {[of_rank.numel() for of_rank in by_rank]}."
            )
    _join_frozen(models, model, trust_pickle)
    return result


def _join_frozen(models: list[Path], model: dict[str, Any], trust_pickle: bool) -> None:
    """Of stage 3, parameters that are not trained: each model file has a part of each."""
    shapes = model.get("frozen_param_shapes") or {}
    if not shapes:
        return
    fragments = [_load(path, trust_pickle)["frozen_param_fragments"] for path in models]
    for name, size in shapes.items():
        whole = torch.cat([of_rank[name].reshape(-1) for of_rank in fragments])
        model["module"][name] = whole[: math.prod(size)].reshape(tuple(size))


def _add_states(stored: Stored, states: dict[str, dict[str, torch.Tensor]], path: Path) -> None:
    for name, by_state in states.items():
        for state, tensor in by_state.items():
            stored.add_state(name, state, tensor, str(path))


def _add_weights(stored: Stored, model: dict[str, Any], path: Path) -> None:
    """Weights as forward reads them. Stage 3 saves none: they are their masters, rounded."""
    rounded = 0
    shared = dict(model.get("shared_params") or {})
    for name, tensor in model["module"].items():
        if not isinstance(tensor, torch.Tensor):
            stored.left_out.append(f"module.{name}: no tensor")
            continue
        states = stored.state.get(name, stored.state.get(shared.get(name, name), {}))
        master = states.get("master")
        if tensor.numel() == 0 and master is not None and master.numel():
            tensor = master.to(tensor.dtype)
            rounded += 1
        stored.add_weight(name, tensor, str(path))
    if rounded:
        stored.left_out.append(
            f"{rounded} weights as forward reads them: ZeRO 3 saves masters, which were rounded"
        )

