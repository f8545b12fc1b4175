# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of any framework in memory: its weights and optimizer states by name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TypeVar

import torch

from .errors import CheckpointError

_T = TypeVar("_T")
#: Parts of names that wrappers of PyTorch add.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)


@dataclasses.dataclass
class Stored:
    """`state` is by parameter, then by name of the state: exp_avg, exp_avg_sq, step, master."""

    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    state: dict[str, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    #: What is not among the tensors, one line each: values that are no tensors.
    left_out: list[str] = dataclasses.field(default_factory=list)
    #: Tensors that the user does not want compared, one line each.
    tensors_left_out: list[str] = dataclasses.field(default_factory=list)
    #: Why parameters of an optimizer are called by their numbers, one line for each optimizer.
    by_number: list[str] = dataclasses.field(default_factory=list)

    def add_weight(self, name: str, tensor: torch.Tensor, where: str) -> None:
        """Adds a weight; `where` is what an error names."""
        if name in self.weights:
            raise CheckpointError(f"{where}: holds two weights of the name {name}.")
        self.weights[name] = tensor

    def add_state(self, name: str, state: str, tensor: torch.Tensor, where: str) -> None:
        """Adds a state of a parameter. Counts of steps become fp32 numbers."""
        if state == "step":
            tensor = tensor.to(torch.float32).reshape(())
        states = self.state.setdefault(name, {})
        if state in states:
            raise CheckpointError(f"{where}: holds two states {state} of {name}.")
        states[state] = tensor

    def take(self, other: Stored, prefix: str = "") -> None:
        """Adds all of another one, whose names get the prefix."""
        for name, tensor in other.weights.items():
            self.add_weight(prefix + name, tensor, prefix)
        for name, states in other.state.items():
            for state, tensor in states.items():
                self.add_state(prefix + name, state, tensor, prefix)
        self.left_out += other.left_out
        self.tensors_left_out += other.tensors_left_out
        self.by_number += other.by_number

    def tensors(self) -> dict[str, torch.Tensor]:
        """NAME and NAME.STATE, without the names that wrappers add.

        A master that is its weight, bit by bit and in the same dtype, is left out: frameworks that
        train in fp32 have it or not. One that differs stays.
        """
        weights = _plain_names(self.weights)
        result = dict(weights)
        for name, states in _plain_names(self.state).items():
            if name not in weights and name.startswith("module.") and name[7:] in weights:
                name = name[7:]
            for state, tensor in states.items():
                weight = weights.get(name)
                if state == "master" and weight is not None and _same(tensor, weight):
                    continue
                full_name = f"{name}.{state}"
                if full_name in result:
                    raise CheckpointError(f"Two tensors must not be called {full_name}.")
                result[full_name] = tensor
        return result


def _plain_names(values: Mapping[str, _T]) -> dict[str, _T]:
    """Without wrappers' parts, and without "module." where all names begin with it."""
    in_module = bool(values) and all(name.startswith("module.") for name in values)
    result: dict[str, _T] = {}
    for name, value in values.items():
        plain = _WRAPPERS.sub("", name[7:] if in_module else name)
        if plain in result:
            raise CheckpointError(f"Two tensors must not be called {plain}, once from {name}.")
        result[plain] = value
    return result


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
