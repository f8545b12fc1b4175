# SPDX-License-Identifier: Apache-2.0
"""What a user may say about a recording (level 2), and how it is looked up."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ._mesh import ALIASES, AXES
from .errors import UsageError

#: A new name for a name: a function, or a mapping (names that it lacks stay).
Rename = Callable[[str], str] | Mapping[str, str]
#: "infer", "replicate", or what axes do: {"tp": 0} cuts dim 0, {"tp": "sum"} is a partial sum.
Layout = str | Mapping[str, int | str]
#: transform(kind, name, tensor): the tensor to record, or several by name, or None to leave it out.
Transformed = torch.Tensor | Mapping[str, torch.Tensor] | None
Transform = Callable[[str, str, torch.Tensor], Transformed]

#: What is known of a framework's names and places; "auto" is the preset of the model's framework.
PRESETS = ("auto", "none", "megatron", "transformers")

KINDS = ("param", "grad", "activation", "activation_grad", "optimizer", "scalar", "data_id", "mask")


@dataclass
class Options:
    """Level 2: names, places and values that the recorder cannot know."""

    rename: Rename | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    transform: Transform | None = None
    not_recorded: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    judging: Mapping[str, Any] = field(default_factory=dict)
    activations: bool = True
    grad_scale: float | None = None
    loss_reduction: str = "avg"
    allow_draws: bool = False
    draws_repeat: bool = False  # the judged run draws what its reference draws: on the same ranks
    preset: str = "auto"
    only: Sequence[str] = ()
    at_steps: Sequence[int] = ()

    def __post_init__(self) -> None:
        for pattern, layout in self.layouts.items():
            _check_layout(pattern, layout)
        if isinstance(self.only, str) or any("/" not in pattern for pattern in self.only):
            raise UsageError(
                f"only must be a list of KIND/NAME patterns, such as param/*, got {self.only!r}."
            )
        if any(not isinstance(step, int) or step < 0 for step in self.at_steps):
            raise UsageError(
                f"Steps to record must be numbers from 0 on, got {list(self.at_steps)}."
            )
        for pattern in (*self.not_recorded, *self.layouts, *self.only):
            kind = pattern.partition("/")[0]
            if "/" in pattern and kind not in KINDS and not set(kind) & set("*?["):
                raise UsageError(
                    f"A pattern must be KIND/NAME with KIND one of {', '.join(KINDS)}, "
                    f"got {pattern!r}."
                )
        if self.preset not in PRESETS:
            raise UsageError(f"preset must be one of {', '.join(PRESETS)}, got {self.preset!r}.")
        if self.loss_reduction not in ("avg", "sum"):
            raise UsageError(f"loss_reduction must be avg or sum, got {self.loss_reduction!r}.")

    def name(self, name: str) -> str:
        """The name that a tensor has in the bundle."""
        if self.rename is None:
            return name
        if isinstance(self.rename, Mapping):
            return self.rename.get(name, name)
        renamed = self.rename(name)
        if not isinstance(renamed, str) or not renamed:
            raise UsageError(f"rename must return a name, got {renamed!r} for {name}.")
        return renamed

    def layout(self, kind: str, name: str) -> Layout | None:
        """What the user says of a tensor's place; the first pattern that fits counts."""
        for pattern, layout in self.layouts.items():
            whole = pattern if "/" in pattern else f"*/{pattern}"
            if fnmatch.fnmatchcase(f"{kind}/{name}", whole):
                return layout
        return None

    def is_left_out(self, kind: str, name: str) -> bool:
        """Whether the user says that a tensor is not recorded."""
        return any(fnmatch.fnmatchcase(f"{kind}/{name}", p) for p in self.not_recorded)


def _check_layout(pattern: str, layout: Layout) -> None:
    if isinstance(layout, str):
        if layout not in ("infer", "replicate"):
            raise UsageError(
                f'The layout of {pattern!r} must be "infer", "replicate" or a mapping such as '
                f'{{"tp": 0}}, got {layout!r}.'
            )
        return
    for axis, what in layout.items():
        if ALIASES.get(axis, axis) not in AXES:
            raise UsageError(
                f"The layout of {pattern!r} must name axes of {', '.join(AXES)}, got {axis!r}."
            )
        if isinstance(what, bool) or not (
            what in ("sum", "avg") or (isinstance(what, int) and what >= 0)
        ):
            raise UsageError(
                f"The layout of {pattern!r} must give a dim (0, 1, ...), sum or avg for each "
                f"axis, got {what!r} for {axis}."
            )
