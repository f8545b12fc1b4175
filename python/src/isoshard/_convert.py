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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from . import _dcp, _pickles, _program, _zero
from ._safetensors import DTYPES, write_safetensors
from ._stored import Stored
from .errors import CheckpointError, UsageError

_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "model_state")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optimizer_state")

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
    stored = read(source, trust_pickle=trust_pickle, weights_only=weights_only)
    if weights_only and stored.state:
        stored.left_out.append(f"optimizer state of {len(stored.state)} parameters (--weights)")
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
    metadata = {"isoshard.left_out": "\n".join(stored.left_out)} if stored.left_out else None
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        write_safetensors(unfinished, [(n, t.detach().contiguous()) for n, t in ordered], metadata)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return stored


def read(source: Path, *, trust_pickle: bool, weights_only: bool = False) -> Stored:
    """A checkpoint in any of the formats that are read."""
    if not source.exists():
        raise CheckpointError(f"{source} must be a file or folder, got none.")
    if not source.is_dir():
        if source.suffix == ".safetensors":
            raise UsageError(f"{source} is a safetensors file already; compare it as it is.")
        stored = Stored()
        content = _pickles.load(source, str(source), trust_pickle)
        _add_content(stored, content, str(source), weights_only)
        return stored
    iterations = source / "latest_checkpointed_iteration.txt"
    if iterations.is_file():
        source = _iteration_of(iterations)
    if _dcp.is_dcp(source):
        return _dcp.read(source, trust_pickle)
    if any(source.glob("mp_rank_*/model_optim_rng.pt")):
        raise CheckpointError(
            f"{source}: Megatron's legacy format (model_optim_rng.pt) is not read: nothing in it "
            "says how tensors are cut. Save with --ckpt-format torch_dist."
        )
    zero = _zero.folder_of(source)
    if zero is not None:
        return _zero.read(zero, trust_pickle)
    return _read_pickled_folder(source, trust_pickle)


def needs_conversion(path: Path) -> bool:
    """Whether isoshard-judge does not read a checkpoint itself."""
    if not path.is_dir():
        return path.suffix in _PICKLES
    if (path / "manifest.json").is_file() or any(path.glob("*.safetensors")):
        return False
    return path.exists()


def _iteration_of(file: Path) -> Path:
    text = file.read_text().strip()
    folder = file.parent / ("release" if text == "release" else f"iter_{text:0>7}")
    if not folder.is_dir():
        raise CheckpointError(f"{file}: must name an iteration beside it, got {text[:80]!r}.")
    return folder


def _read_pickled_folder(folder: Path, trust_pickle: bool) -> Stored:
    """pytorch_model.bin, or the files that pytorch_model.bin.index.json names."""
    stored = Stored()
    index = folder / "pytorch_model.bin.index.json"
    names = ["pytorch_model.bin"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index}: must have a weight_map from tensor to file.") from None
    elif not (folder / names[0]).is_file():
        raise CheckpointError(
            f"{folder}: must be a checkpoint of DCP (.metadata), DeepSpeed (latest, "
            "*_model_states.pt) or Megatron (torch_dist), or hold pytorch_model.bin, got "
            f"{sorted(path.name for path in folder.iterdir())[:8]}."
        )
    for name in names:
        if Path(str(name)).name != name:
            raise CheckpointError(f"{index}: files must lie beside it, got {name!r}.")
        path = folder / name
        _add_content(stored, _pickles.load(path, str(path), trust_pickle), str(path), True)
    return stored


def _add_content(stored: Stored, content: Any, where: str, weights_only: bool) -> None:
    """What torch.save wrote: a state dict, or a dictionary with one and an optimizer's."""
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{where}: must hold a dictionary of tensors, got {type(content).__name__}."
        )
    model_keys = [k for k in _MODEL_KEYS if isinstance(content.get(k), Mapping)]
    optimizer_keys = [k for k in _OPTIMIZER_KEYS if isinstance(content.get(k), Mapping)]
    if len(model_keys) > 1 or len(optimizer_keys) > 1:
        raise CheckpointError(
            f"{where}: must hold one model and one optimizer, got {model_keys + optimizer_keys}."
        )
    if not model_keys and not optimizer_keys:
        if isinstance(content.get("state"), Mapping) and "param_groups" in content:
            add_optimizer(stored, content, {}, where)
        else:
            _add_weights(stored, content, where)
        return
    model = content[model_keys[0]] if model_keys else {}
    _add_weights(stored, model, where)
    if optimizer_keys and not weights_only:
        add_optimizer(stored, content[optimizer_keys[0]], model, where)
    for name, value in content.items():
        if name in model_keys or name in optimizer_keys:
            continue
        short = repr(value) if isinstance(value, (int, float, str, bool)) else type(value).__name__
        stored.left_out.append(f"{name}: {short[:80]}")


def _add_weights(stored: Stored, values: Mapping[Any, Any], where: str, prefix: str = "") -> None:
    for name, value in values.items():
        full_name = f"{prefix}{name}"
        if isinstance(value, torch.Tensor):
            stored.add_weight(full_name, value, where)
        elif isinstance(value, Mapping):
            _add_weights(stored, value, where, f"{full_name}.")
        else:
            stored.left_out.append(f"{full_name}: {type(value).__name__}")


def add_optimizer(
    stored: Stored, optimizer: Mapping[str, Any], model: Mapping[str, Any], where: str
) -> None:
    """The state dict of an optimizer, by parameter's name or by its number.

    Numbers become names by `param_names` of the groups, which an optimizer has that was given
    named_parameters(). Without them the parameters must be all tensors of the model in order.
    """
    state = optimizer.get("state")
    groups = optimizer.get("param_groups", [])
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{where}: the optimizer must have a state, got {list(optimizer)}.")
    numbers = any(isinstance(key, int) for key in state)
    names = _names_of_numbers(state, groups, model, where) if numbers else {}
    for key, states in state.items():
        for name, value in states.items():
            if isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool):
                stored.add_state(str(names.get(key, key)), str(name), torch.as_tensor(value), where)
            else:
                stored.left_out.append(f"{names.get(key, key)}.{name}: {type(value).__name__}")
    leave_out_settings(stored, groups)


def _names_of_numbers(
    state: Mapping[Any, Any], groups: Sequence[Any], model: Mapping[str, Any], where: str
) -> dict[Any, str]:
    if all("param_names" in group for group in groups):
        return {
            number: name
            for group in groups
            for number, name in zip(group["params"], group["param_names"], strict=True)
        }
    names: list[str] = []
    seen = set()
    for name, tensor in model.items():
        if isinstance(tensor, torch.Tensor):
            storage = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
            if tensor.numel() == 0 or storage not in seen:  # a tied weight is one parameter
                names.append(name)
            seen.add(storage)
    numbers = [number for group in groups for number in group["params"]]
    fits = len(groups) == 1 and len(numbers) == len(names)
    for number, name in zip(numbers, names, strict=False):
        moments = [
            value
            for value in state.get(number, {}).values()
            if isinstance(value, torch.Tensor) and value.dim() > 0
        ]
        fits = fits and all(moment.shape == model[name].shape for moment in moments)
    if not fits:
        raise CheckpointError(
            f"{where}: the optimizer numbers its {len(numbers)} parameters in {len(groups)} "
            f"groups, and nothing says which of the {len(names)} tensors of the model each is. "
            "Save it with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or "
            "build the optimizer with model.named_parameters(). --weights converts the weights "
            "alone."
        )
    return dict(zip(numbers, names, strict=True))


def leave_out_settings(stored: Stored, groups: Sequence[Mapping[str, Any]]) -> None:
    """Lists the settings of an optimizer, which are not tensors."""
    for index, group in enumerate(groups):
        settings = ", ".join(
            f"{name}={value}"
            for name, value in group.items()
            if isinstance(value, (bool, int, float, str, tuple, list)) and "param" not in name
        )
        stored.left_out.append(f"settings of the optimizer's group {index}: {settings}")


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
    for line in stored.left_out:
        print(f"  not converted: {line}")
    return 0


def compare(words: Sequence[str]) -> int:
    """`isoshard compare --checkpoint A B`: what isoshard-judge does not read is converted first."""
    trust_pickle = "--trust-pickle" in words
    weights_only = "--weights" in words
    rest = [word for word in words if word not in ("--trust-pickle", "--weights")]
    places = _places_of_checkpoints(rest)
    converted: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="isoshard-") as folder:
        for side, at in zip(("reference", "actual"), places, strict=False):
            source = Path(rest[at])
            if not needs_conversion(source):
                continue
            target = Path(folder) / side / source.resolve().name / "model.safetensors"
            convert(source, target, trust_pickle=trust_pickle, weights_only=weights_only)
            config = (source if source.is_dir() else source.parent) / "config.json"
            if config.is_file():
                shutil.copy(config, target.parent / "config.json")
            rest[at] = str(target.parent)
            converted[rest[at]] = str(source)
        rest += ["--made-by", json.dumps([*_program.started_as(), *words])]
        columns = shutil.get_terminal_size((100, 24)).columns
        code, text = _program.call(rest, capture=True, columns=columns)
    for place, name in converted.items():
        text = text.replace(place, name)
    print(text, end="", flush=True, file=sys.stdout if code in (0, 1) else sys.stderr)
    return code


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
