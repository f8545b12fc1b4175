# SPDX-License-Identifier: Apache-2.0
"""Readers of files run with the real names; what they read is widened.

Writers of safetensors run with the real names, too: a file says the dtype that its bytes have.
torch.save, and checkpoints of torch.distributed, need nothing: their bytes and names go together.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ._copies import replace_copies
from ._imports import after_import
from ._names import WIDE_OF, asked, is_paused, real_names
from ._strays import _made_wide, become

#: Module and function.
_READERS = (
    ("torch", "load"),
    ("torch.serialization", "load"),
    ("torch._utils", "_rebuild_tensor"),  # of pickle, and of tensors from other processes
    ("torch._utils", "_rebuild_tensor_v3"),
    ("safetensors", "safe_open"),
    ("safetensors.torch", "safe_open"),
    ("safetensors.torch", "load"),
    ("safetensors.torch", "load_file"),
    ("safetensors.torch", "load_model"),
    ("safetensors.torch", "save"),
    ("safetensors.torch", "save_file"),
    ("safetensors.torch", "save_model"),
)


def readers() -> list[Any]:
    """The functions that `install` would wrap now."""
    found = [getattr(sys.modules.get(module), name, None) for module, name in _READERS]
    return [function for function in found if function is not None]


def install() -> None:
    """Wraps the readers that are there, and those of modules that are imported later."""
    replaced: dict[int, Any] = {}
    for module, name in _READERS:
        if module in sys.modules:
            replaced |= _wrap(sys.modules[module], name)
    replace_copies(replaced)
    after_import(_wrap_later)


def _wrap(module: Any, name: str) -> dict[int, Any]:
    """Returns the new function by the id of the old one, if there was one to wrap."""
    original = getattr(module, name, None)
    if original is None or hasattr(original, "_isoshard_reads"):
        return {}
    wrapped: Any = (_opener if name == "safe_open" else _reader)(original)
    wrapped._isoshard_reads = True
    setattr(module, name, wrapped)
    return {id(original): wrapped}


def _opener(original: Callable[..., Any]) -> Callable[..., Any]:
    """safetensors.safe_open: files read tensors when they are asked for them."""

    @functools.wraps(original, updated=())
    def open_file(*args: Any, **kwargs: Any) -> Any:
        file = original(*args, **kwargs)
        return file if is_paused() else _File(file)

    return open_file


class _File:
    """An open file, or a slice of one, that widens the tensors that it returns."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getitem__(self, index: Any) -> Any:
        return _reader(self._file.__getitem__)(index)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file, name)
        if name == "get_slice":
            return lambda *args: _File(value(*args))
        return _reader(value) if callable(value) else value


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
        if id(value.dtype) in WIDE_OF:
            become(value, _widened(value.detach()))
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
    """As module.to, but each tensor has its own wide dtype."""
    module._apply(lambda tensor: _widened(tensor.data))  # type: ignore[no-untyped-call]


def _wrap_later(name: str, module: Any) -> None:
    for owner, function in _READERS:
        if owner == name:
            _wrap(module, function)
