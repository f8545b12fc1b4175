# SPDX-License-Identifier: Apache-2.0
"""Widens narrow tensors that did not come from the names, at every call of torch.

They come from numpy, from old constructors, from arguments whose default was taken with the real
names, and from C++ code.
"""

from __future__ import annotations

import functools
import re
import types as python_types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._names import WIDE_OF, asked, asked_by_default, is_paused
from ._notes import see, see_failed
from ._tags import asked_of, tag

_FACTORIES = frozenset(
    "empty zeros ones full empty_strided eye linspace logspace arange tensor as_tensor "
    "scalar_tensor".split()
)
#: They make a tensor of the first argument's dtype.
_ALIKE = frozenset(
    "empty_like zeros_like ones_like full_like clone new_empty new_zeros new_ones new_full "
    "new_tensor new_empty_strided detach_copy".split()
)
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
_CASTS |= {"double": torch.float64}
_COMPLEX_CASTS = {"cfloat": torch.complex64, "chalf": torch.complex32}
_DOUBLE, _FLOAT = torch.float64, torch.float32
_NARROW_TYPES = ("BFloat16Tensor", "HalfTensor", "FloatTensor")
#: What kernels say that do not take float64.
_OF_DTYPES = re.compile(r"double|float64|bfloat16|half|float8|dtype|scalar ?type", re.IGNORECASE)
_GETTERS = (python_types.MethodWrapperType, python_types.WrapperDescriptorType)


#: Functions that make tensors and that no mode sees. What they return shares no memory any more.
_UNSEEN = ("from_numpy", "frombuffer", "from_dlpack")


def install() -> None:
    """The mode stays on until the process ends."""
    owner: Any = torch
    for name in _UNSEEN:
        setattr(owner, name, _widening(getattr(owner, name)))
    _Widening().__enter__()


def _widening(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_paused():
            return original(*args, **kwargs)
        wanted = kwargs.get("dtype")
        if isinstance(wanted, torch.dtype):  # the bytes are of this dtype
            kwargs["dtype"] = asked(wanted)
        return _widened(original(*args, **kwargs))

    return call


class _Widening(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_paused() or isinstance(func, _GETTERS):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _CASTS and len(args) == 1:
            return _cast(args[0], _CASTS[name], kwargs)
        if name in _COMPLEX_CASTS:
            return args[0].to(torch.complex128)
        if name == "type":
            return _type(func, args, kwargs)
        wanted = None
        if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            wanted = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype))
            args = [_wide(value) for value in args]
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
        for value in (*args, *kwargs.values()):
            _widen_in_place(value)
        if name in ("to", "type_as") and isinstance(args[0], torch.Tensor):
            other = args[1] if len(args) > 1 else kwargs.get("other")
            if wanted is not None:
                return _to(func, args, kwargs, asked(wanted))
            if isinstance(other, torch.Tensor):
                return _to(func, args, kwargs, asked_of(other))
        try:
            result = _widened(func(*args, **kwargs))
        except Exception as error:
            if _OF_DTYPES.search(str(error)):
                see_failed(name, error)
            raise
        if isinstance(result, torch.Tensor):
            if wanted is not None:
                tag(result, asked(wanted))
            elif name in _FACTORIES and asked_by_default() is not _FLOAT:
                tag(result, asked_by_default())
            elif name in _ALIKE and isinstance(args[0], torch.Tensor):
                tag(result, asked_of(args[0]))
        return result


def _wide(value: Any) -> Any:
    return WIDE_OF.get(id(value), value) if isinstance(value, torch.dtype) else value


def _widened(value: Any) -> Any:
    """A result of torch; tensors in tuples and lists, too."""
    if isinstance(value, torch.Tensor):
        wide = WIDE_OF.get(id(value.dtype))
        return value if wide is None else _made_wide(value, wide)
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return value


def _made_wide(value: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    narrow = value.dtype
    result = value.to(wide)
    if value.is_leaf and value.requires_grad:
        result = result.detach().requires_grad_()
    tag(result, narrow)
    return result


def _widen_in_place(value: Any) -> None:
    """A tensor that was made behind torch's back, among the arguments of a call."""
    if isinstance(value, torch.Tensor):
        wide = WIDE_OF.get(id(value.dtype))
        if wide is not None and value.grad_fn is None and not value._is_view():
            narrow = value.dtype
            value.data = value.data.to(wide)
            tag(value, narrow)
    elif type(value) in (tuple, list):
        for part in value:
            _widen_in_place(part)


def _cast(tensor: torch.Tensor, to: torch.dtype, kwargs: dict[str, Any]) -> torch.Tensor:
    return _to(torch.Tensor.to, [tensor, _DOUBLE], kwargs, to)


def _to(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], to: torch.dtype) -> Any:
    """A cast between dtypes that are two for the script makes a new tensor, as it would natively.

    What is written into the one must not be seen in the other.
    """
    see(to)
    tensor = args[0]
    result = func(*args, **kwargs)
    if result is tensor and to is not asked_of(tensor) and tensor.is_floating_point():
        result = tensor.clone()
    if result is not tensor:
        tag(result, to)
    return result


def _type(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """x.type() is the name of the type that the script would see; x.type(T) is a cast."""
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        text = func(*args, **kwargs)
        is_double = asked_of(args[0]) is _DOUBLE
        return text if is_double else text.replace("DoubleTensor", "FloatTensor")
    if isinstance(wanted, torch.dtype):
        return _to(torch.Tensor.to, [args[0], _wide(wanted)], {}, asked(wanted))
    text = wanted if isinstance(wanted, str) else f"{wanted.__module__}.{wanted.__name__}"
    for narrow in _NARROW_TYPES:
        text = text.replace(narrow, "DoubleTensor")
    return func(args[0], text)
