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
    ("torch._utils", "", "_rebuild_tensor"),  # of pickle, and of tensors from other processes
    ("torch._utils", "", "_rebuild_tensor_v3"),
    ("safetensors.torch", "", "load"),
    ("safetensors.torch", "", "load_file"),
    ("transformers.modeling_utils", "PreTrainedModel", "from_pretrained"),
)


def install() -> None:
    """Wraps the readers that are there, and those of modules that are imported later."""
    for module in {module for module, _, _ in _READERS} | {"safetensors"}:
        if module in sys.modules:
            _wrap_all(module, sys.modules[module])
    after_import(_wrap_all)


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


class _Opened:
    """A file of safetensors, or a slice of a tensor in it, whose tensors are read as above."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __enter__(self) -> _Opened:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._inner.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, index: Any) -> Any:
        return _reader(self._inner.__getitem__)(index)

    def get_tensor(self, name: str) -> Any:
        """The tensor of a name."""
        return _reader(self._inner.get_tensor)(name)

    def get_slice(self, name: str) -> _Opened:
        """What parts of a tensor can be read from."""
        return _Opened(self._inner.get_slice(name))


def _wrap_safe_open(module: Any) -> None:
    original = module.safe_open

    def safe_open(*args: Any, **kwargs: Any) -> Any:
        file = original(*args, **kwargs)
        return file if is_paused() else _Opened(file)

    module.safe_open = safe_open


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


def _wrap_all(name: str, module: Any) -> None:
    for owner, kind, function in _READERS:
        if owner == name:
            _wrap(module, kind, function)
    if name == "safetensors":
        _wrap_safe_open(module)
