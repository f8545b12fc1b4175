# SPDX-License-Identifier: Apache-2.0
"""All tensors that can be reached in what torch.save wrote, by name.

The weights of the one model keep their own names, and the state of its optimizer is called
NAME.STATE. Every other tensor is called by its path: ema.0.weight, discriminator.head.bias,
layers.0.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ._pickles import Inert
from ._stored import Stored
from .errors import CheckpointError

Path = tuple[str, ...]

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module", "model_state")
_DEEPEST = 100
#: So many values of one key that are no tensors are listed one by one.
_LISTED = 8


@dataclass
class _Reached:
    """What a walk through the content finds."""

    where: str
    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    optimizers: dict[Path, Mapping[str, Any]] = field(default_factory=dict)
    others: list[tuple[Path, Any]] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)  # the containers around what is walked through

    def walk(self, value: Any, path: Path) -> None:
        if len(path) > _DEEPEST:
            raise CheckpointError(
                f"{self.where}: must nest at most {_DEEPEST} containers, got more at "
                f"{'.'.join(path[:4])}."
            )
        if isinstance(value, torch.Tensor):
            self.tensors[path] = value if value.layout == torch.strided else value.to_dense()
        elif is_optimizer(value):
            self.optimizers[path] = value
        elif id(value) not in self._open:
            self._open.add(id(value))
            parts = list(_parts_of(value))
            for key, part in parts:
                self.walk(part, (*path, key))
            if not parts:
                self.others.append((path, value))
            self._open.remove(id(value))

    def models(self) -> list[dict[str, torch.Tensor]]:
        """The tensors of each dictionary that holds some directly or further in, by own names."""
        heads = dict.fromkeys(path[:1] for path in self.tensors)
        roots = [*sorted(heads, key=_rank_of_model), ()]
        return [
            {
                ".".join(path[len(root) :]): tensor
                for path, tensor in self.tensors.items()
                if path[: len(root)] == root and len(path) > len(root)
            }
            for root in roots
        ]


def add_content(
    stored: Stored, content: Any, where: str, *, weights_only: bool = False, prefix: str = ""
) -> None:
    """Adds what torch.save wrote; `prefix` stands before every path, `where` is named by errors.

    Raises CheckpointError if `content` is neither a dictionary nor a list of tensors.
    """
    if isinstance(content, torch.Tensor) or not isinstance(content, _CONTAINERS):
        raise CheckpointError(
            f"{where}: must hold a dictionary of tensors, got {type(content).__name__}."
        )
    reached = _Reached(where)
    reached.walk(content, ())
    heads = {path[:1] for path in reached.tensors}
    main = next(((key,) for key in _MODEL_KEYS if (key,) in heads), ())
    for path, tensor in reached.tensors.items():
        own = path[len(main) :] if path[: len(main)] == main else path
        stored.add_weight(prefix + ".".join(own), tensor, where)
    if weights_only:
        number = sum(len(optimizer["state"]) for optimizer in reached.optimizers.values())
        if number > 0:
            stored.tensors_left_out.append(f"optimizer state of {number} parameters (--weights)")
    else:
        _add_optimizers(stored, reached, prefix)
    _list_others(stored, reached, main)


def is_optimizer(value: Any) -> bool:
    """Whether this is the state dict of a torch optimizer."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), (list, tuple))
    )


_CONTAINERS = (Mapping, list, tuple, set, frozenset, Inert, torch.nn.Module)


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Key and value of each part of a container; nothing of other values."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, Mapping):
        wrapped = _is_wrapped(value)
        for key, part in value.items():
            yield (key[len(_WRAPPER) :] if wrapped else str(key)), part
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((str(i), part) for i, part in enumerate(value))
    elif hasattr(value, "__dict__") and not isinstance(value, _WITHOUT_PARTS):
        yield from vars(value).items()


_WRAPPER = "module."
_WITHOUT_PARTS = (type, types.ModuleType, types.FunctionType)


def _is_wrapped(values: Mapping[Any, Any]) -> bool:
    return bool(values) and all(isinstance(k, str) and k.startswith(_WRAPPER) for k in values)


def _rank_of_model(path: Path) -> int:
    """Models that are called so come first."""
    return _MODEL_KEYS.index(path[0]) if path and path[0] in _MODEL_KEYS else len(_MODEL_KEYS)


# -- optimizers ----------------------------------------------------------------------------------


def _add_optimizers(stored: Stored, reached: _Reached, prefix: str) -> None:
    models: list[Mapping[str, torch.Tensor]]
    models = [*reached.models(), stored.weights]  # those of other files, too
    if len(reached.optimizers) > 1:
        models = []  # nothing says whose parameters each of them has
    names = {
        path: names_of_optimizer(optimizer, models, reached.where)
        for path, optimizer in reached.optimizers.items()
    }
    used = Counter(name for of in names.values() if isinstance(of, dict) for name in of.values())
    for path, optimizer in reached.optimizers.items():
        of = names[path]
        at = (prefix + ".".join(path)).rstrip(".") or "optimizer"
        if isinstance(of, str):
            stored.by_number.append(of)
            of = {key: str(key) for key in optimizer["state"]}
            add_states(stored, optimizer, of, reached.where, f"{at}.", at)
            continue
        is_alone = all(used[name] == 1 and name not in stored.state for name in of.values())
        add_states(stored, optimizer, of, reached.where, "" if is_alone else f"{at}.", at)


def names_of_optimizer(
    optimizer: Mapping[str, Any], models: Sequence[Mapping[str, torch.Tensor]], where: str
) -> dict[Any, str] | str:
    """The parameter's name of each key of a state; why there is none if nothing says so.

    Numbers become names by `param_names` of the groups, which an optimizer has that was given
    named_parameters(). Without them the parameters must be all tensors of a model in order.
    """
    state, groups = optimizer["state"], optimizer["param_groups"]
    numbers = [number for group in groups for number in group["params"]]
    if not any(isinstance(key, int) for key in state):
        return _unwrapped({key: str(key) for key in state})
    if all("param_names" in group for group in groups):
        listed = [name for group in groups for name in group["param_names"]]
        of_numbers = _unwrapped(dict(zip(numbers, map(str, listed), strict=True)))
        return {key: of_numbers.get(key, str(key)) for key in state}
    for model in models:
        names = _distinct(model)
        if len(groups) == 1 and _fits(state, numbers, names, model):
            return dict(zip(numbers, names, strict=True))
    size = max(len(_distinct(model)) for model in models) if models else 0
    return (
        f"{where}: the optimizer numbers its {len(numbers)} parameters in {len(groups)} "
        f"groups, and nothing says which of the {size} tensors of the model each is. "
        "Save it with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or "
        "build the optimizer with model.named_parameters(). --weights converts the weights "
        "alone."
    )


def _unwrapped(names: dict[Any, str]) -> dict[Any, str]:
    wrapped = bool(names) and all(name.startswith(_WRAPPER) for name in names.values())
    return {key: name[len(_WRAPPER) :] for key, name in names.items()} if wrapped else names


def _distinct(model: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of a model's tensors; a tied weight counts once."""
    names: list[str] = []
    seen = set()
    for name, tensor in model.items():
        storage = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() == 0 or storage not in seen:
            names.append(name)
        seen.add(storage)
    return names


def _fits(
    state: Mapping[Any, Any],
    numbers: Sequence[Any],
    names: Sequence[str],
    model: Mapping[str, torch.Tensor],
) -> bool:
    """Whether the numbered parameters have the shapes of a model's tensors, one by one."""
    if len(numbers) != len(names):
        return False
    for number, name in zip(numbers, names, strict=True):
        for value in state.get(number, {}).values():
            is_moment = isinstance(value, torch.Tensor) and value.dim() > 0
            if is_moment and value.shape != model[name].shape:
                return False
    return True


def add_states(
    stored: Stored,
    optimizer: Mapping[str, Any],
    names: Mapping[Any, str],
    where: str,
    prefix: str = "",
    at: str = "optimizer",
) -> None:
    """The state of each parameter, and what else an optimizer's state dict holds of tensors."""
    for key, states in optimizer["state"].items():
        name = prefix + names.get(key, str(key))
        if not isinstance(states, Mapping):
            states = {"state": states}
        for state, value in states.items():
            _add_state(stored, name, str(state), value, where)
    others = _Reached(where)
    for key, value in optimizer.items():
        if key == "param_groups":
            settings = [{k: v for k, v in g.items() if k != "params"} for g in value]
            others.walk(settings, (key,))
        elif key != "state":
            others.walk(value, (key,))
    for path, tensor in others.tensors.items():
        stored.add_weight(".".join((at, *path)), tensor, where)
    leave_out_settings(stored, optimizer["param_groups"])


def _add_state(stored: Stored, name: str, state: str, value: Any, where: str) -> None:
    if isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool):
        stored.add_state(name, state, torch.as_tensor(value), where)
        return
    parts = list(_parts_of(value))
    for key, part in parts:
        _add_state(stored, name, f"{state}.{key}", part, where)
    if not parts:
        stored.left_out.append(f"{name}.{state}: {type(value).__name__}")


def leave_out_settings(stored: Stored, groups: Sequence[Mapping[str, Any]]) -> None:
    """Lists the settings of an optimizer, which are not tensors."""
    for index, group in enumerate(groups):
        settings = ", ".join(
            f"{name}={value}"
            for name, value in group.items()
            if isinstance(value, (bool, int, float, str, tuple, list)) and "param" not in name
        )
        stored.left_out.append(f"settings of the optimizer's group {index}: {settings}")


# -- other values --------------------------------------------------------------------------------


def _list_others(stored: Stored, reached: _Reached, main: Path) -> None:
    """Lists each value other than a tensor; one line for a key that has many of them."""
    numbers = Counter(path[:1] for path, _ in reached.others)
    for head, number in numbers.items():
        if number > _LISTED and head != main:
            stored.left_out.append(f"{'.'.join(head)}: {number} values that are not tensors")
    for path, value in reached.others:
        if path and (numbers[path[:1]] <= _LISTED or path[:1] == main):
            is_short = isinstance(value, (int, float, str, bool)) and path[:1] != main
            short = repr(value) if is_short else type(value).__name__
            own = path[1:] if path[:1] == main and len(path) > 1 else path
            stored.left_out.append(f"{'.'.join(own)}: {short[:80]}")
