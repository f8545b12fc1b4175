# SPDX-License-Identifier: Apache-2.0
"""Readers of files run with the real names; what they read is widened."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ._imports import after_import
from ._names import WIDE_OF, asked, is_paused, real_names
from ._strays import _made_wide

#: Module, class or "", function.
_READERS = (
    ("torch", "", "load"),
    ("torch.serialization", "", "load"),
    ("safetensors.torch", "", "load"),
    ("safetensors.torch", "", "load_file"),
    ("transformers.modeling_utils", "PreTrainedModel", "from_pretrained"),
)


def install() -> None:
    """Wraps the readers that are there, and those of modules that are imported later."""
    for module, owner, name in _READERS:
        if module in sys.modules:
            _wrap(sys.modules[module], owner, name)
    after_import(_wrap_later)


def _wrap(module: Any, owner: str, name: str) -> None:
    holder = getattr(module, owner) if owner else module
    raw = vars(holder).get(name)
    if raw is None or hasattr(raw, "_isoshard_reads"):
        return
    is_class_method = isinstance(raw, classmethod)
    wrapped: Any = _reader(raw.__func__ if is_class_method else raw)
    wrapped = classmethod(wrapped) if is_class_method else wrapped
    wrapped._isoshard_reads = True
    setattr(holder, name, wrapped)


def _reader(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(*args: Any, **kwargs: Any) -> Any:
        if is_paused():
            return original(*args, **kwargs)
        with real_names():
            args = tuple(asked(v) if isinstance(v, torch.dtype) else v for v in args)
            kwargs = {k: asked(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
            return _widened(original(*args, **kwargs))

    return read


def _widened(value: Any) -> Any:
    """What a reader returns: tensors, containers of them, a module."""
    if isinstance(value, torch.nn.Module):
        _widen_module(value)
        return value
    if isinstance(value, torch.nn.Parameter):
        value.data = _widened(value.data)
        return value
    if isinstance(value, torch.Tensor):
        wide = WIDE_OF.get(id(value.dtype))
        return value if wide is None else _made_wide(value, wide)
    if isinstance(value, dict):
        for key, part in value.items():
            value[key] = _widened(part)
        return value
    if isinstance(value, Mapping) or type(value) not in (list, tuple):
        return value
    return type(value)(map(_widened, value))


def _widen_module(module: torch.nn.Module) -> None:
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                _widened(parameter)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _widened(buffer)


def _wrap_later(name: str, module: Any) -> None:
    for owner, kind, function in _READERS:
        if owner == name:
            _wrap(module, kind, function)
