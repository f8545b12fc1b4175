# SPDX-License-Identifier: Apache-2.0
"""What is known of a framework's local tensors, so that a user need not say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from . import _megatron, _transformers
from ._options import Layout, Options, Transform

_OF: Mapping[str, Callable[[torch.nn.Module], Transform]] = {
    "megatron": _megatron.preset,
    "transformers": _transformers.preset,
}
_LAYOUTS: Mapping[str, Callable[[torch.nn.Module], dict[str, Layout]]] = {
    "megatron": _megatron.layouts,
    "transformers": _transformers.layouts,
}


def with_preset(options: Options, model: torch.nn.Module) -> Options:
    """The options with the preset of the model's framework in front of the user's transform."""
    name = options.preset
    if name == "auto":
        name = "megatron" if _megatron.is_megatron(model) else "none"
        name = "transformers" if _transformers.has_plan(model) else name
    if name == "none":
        return options
    layouts = {**options.layouts, **_LAYOUTS[name](model)}
    options = replace(options, layouts=layouts)
    known, own = _OF[name](model), options.transform
    if own is None:
        return replace(options, transform=known)
    return replace(options, transform=_chained(known, own))


def _chained(first: Transform, second: Transform) -> Transform:
    def transform(kind: str, name: str, tensor: torch.Tensor) -> Any:
        result = first(kind, name, tensor)
        named = result if isinstance(result, Mapping) else {name: result}
        found: dict[str, torch.Tensor] = {}
        for key, value in named.items():
            mine = None if value is None else second(kind, key, value)
            if mine is not None:
                found.update(mine if isinstance(mine, Mapping) else {key: mine})
        return found or None

    return transform
