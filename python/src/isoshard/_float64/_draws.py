# SPDX-License-Identifier: Apache-2.0
"""Random numbers are drawn in the dtype that the script asked for, and then widened.

A generator gives other numbers in float64, so that both precisions would train other weights on
other data. These are functions in place of torch's: nn.init calls them inside of functions that a
TorchFunctionMode sees as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ._names import asked, asked_by_default, is_paused, real_names, wide_of
from ._tags import asked_of, tag

_FACTORIES = ("randn", "rand")
_ALIKE = ("randn_like", "rand_like")
_IN_PLACE = (
    "normal_",
    "uniform_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
    "bernoulli_",
    "random_",
)
_DOUBLE = torch.float64


def install() -> None:
    """Puts the functions in place of torch's."""
    owner: Any = torch
    for name in _FACTORIES:
        setattr(owner, name, _factory(getattr(owner, name)))
    for name in _ALIKE:
        setattr(owner, name, _alike(getattr(owner, name)))
    owner.normal = _normal(owner.normal)
    for name in _IN_PLACE:
        setattr(torch.Tensor, name, _in_place(getattr(torch.Tensor, name)))
    init: Any = torch.nn.init  # it computes with what it drew
    init._no_grad_trunc_normal_ = _in_place(init._no_grad_trunc_normal_)


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        out = kwargs.get("out")
        if is_paused():
            return original(*args, dtype=dtype, **kwargs)
        if out is not None:
            kwargs.pop("out")
            return out.copy_(draw(*args, dtype=asked_of(out), **kwargs))
        wanted = asked_by_default() if dtype is None else asked(dtype)
        return _drawn(original, args, kwargs, wanted)

    return draw


def _alike(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(like: torch.Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if is_paused():
            return original(like, dtype=dtype, **kwargs)
        wanted = asked_of(like) if dtype is None else asked(dtype)
        return _drawn(original, (like,), kwargs, wanted)

    return draw


def _drawn(
    original: Callable[..., Any], args: Any, kwargs: dict[str, Any], wanted: torch.dtype
) -> torch.Tensor:
    needs_gradient = kwargs.pop("requires_grad", False)
    with real_names():
        narrow = original(*args, dtype=wanted, **kwargs)
        wide: torch.Tensor = narrow.to(wide_of(wanted))
    tag(wide, wanted)
    return wide.requires_grad_() if needs_gradient else wide


def _normal(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.normal: with sizes a factory, with tensors of means or deviations not."""
    factory = _factory(original)

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        if is_paused() or not tensors or "out" in kwargs:
            return original(*args, **kwargs) if is_paused() or tensors else factory(*args, **kwargs)
        wanted = asked_of(tensors[0])
        with real_names():
            given = [v.to(wanted) if isinstance(v, torch.Tensor) else v for v in args]
            for key, value in kwargs.items():
                if isinstance(value, torch.Tensor):
                    kwargs[key] = value.to(wanted)
            wide = original(*given, **kwargs).to(wide_of(wanted))
        tag(wide, wanted)
        return wide

    return draw


def _in_place(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = asked_of(tensor)
        if is_paused() or tensor.dtype != _DOUBLE or wanted is _DOUBLE:
            result: torch.Tensor = original(tensor, *args, **kwargs)
            return result
        with real_names(), torch.no_grad():
            narrow = _empty(tensor, wanted)
            original(narrow, *args, **kwargs)
            wide = narrow.to(_DOUBLE)
        return tensor.copy_(wide)

    return draw


def _empty(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The order of the elements in memory is the order in which they are drawn."""
    if like.is_contiguous() or hasattr(like, "_local_tensor") or like.layout is not torch.strided:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty_strided(like.size(), like.stride(), dtype=dtype, device=like.device)
