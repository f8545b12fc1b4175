# SPDX-License-Identifier: Apache-2.0
"""Widens narrow tensors that did not come from the names, at every call of torch.

They come from numpy, from old constructors, from arguments whose default was taken with the real
names, and from C++ code.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import types as python_types
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ._imports import is_of_a_library, is_of_python
from ._names import WIDE_OF, asked, asked_by_default, is_paused, name_of, real_names
from ._notes import see, see_failed, see_outside
from ._tags import asked_of, has_tags, tag

_FACTORIES = frozenset(
    [
        "empty",
        "zeros",
        "ones",
        "full",
        "empty_strided",
        "eye",
        "linspace",
        "logspace",
        "arange",
        "tensor",
        "as_tensor",
        "scalar_tensor",
    ]
)
#: They may be given an array of numpy.
_OF_ARRAYS = frozenset(["tensor", "as_tensor", "asarray"])
#: They make a tensor of the first argument's dtype.
_ALIKE = frozenset(
    [
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "clone",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_tensor",
        "new_empty_strided",
        "detach_copy",
    ]
)
_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
_CASTS |= {"double": torch.float64}
_COMPLEX_CASTS = {"cfloat": torch.complex64, "chalf": torch.complex32}
_DOUBLE, _FLOAT = torch.float64, torch.float32
#: They answer with a dtype or a bool, and compute nothing.
_OF_DTYPES_ALONE = frozenset(["promote_types", "result_type", "can_cast"])
#: What kernels say that do not take float64.
_OF_DTYPES = re.compile(r"double|float64|bfloat16|half|float8|dtype|scalar ?type", re.IGNORECASE)
#: By id, because all dtypes have one hash here.
_TYPES = {
    id(torch.bfloat16): "BFloat16Tensor",
    id(torch.float16): "HalfTensor",
    id(_FLOAT): "FloatTensor",
}
_GETTERS = python_types.MethodWrapperType
#: As torch hands attributes to a mode.
_TENSOR: Any = torch.Tensor
_GET_DTYPE, _GET_GRAD = _TENSOR.dtype.__get__, _TENSOR.grad.__get__

_is_preparing = True  # until the first optimizer is built

#: Functions that make tensors and that no mode sees. What they return shares no memory any more.
_UNSEEN = ("from_numpy", "frombuffer", "from_dlpack")


def install() -> None:
    """The mode stays on until the process ends, in all threads."""
    owner: Any = torch
    for name in _UNSEEN:
        setattr(owner, name, _widening(getattr(owner, name)))
    parser: Any = torch._C._nn
    parser._parse_to = _parsing(parser._parse_to)
    mode: Any = _Widening()
    mode.__enter__()
    kind: Any = threading.Thread
    begin = kind._bootstrap_inner

    def begin_widening(thread: threading.Thread) -> None:
        with _Widening():
            begin(thread)

    kind._bootstrap_inner = begin_widening
    _install_in_backward()
    _install_end_of_preparation()


def prepare() -> None:
    """A program begins in this process."""
    global _is_preparing
    _is_preparing = True


def _install_end_of_preparation() -> None:
    kind: Any = torch.optim.Optimizer
    init = kind.__init__

    @functools.wraps(init)
    def new_init(self: Any, *args: Any, **kwargs: Any) -> None:
        global _is_preparing
        _is_preparing = False
        init(self, *args, **kwargs)

    kind.__init__ = new_init


def _install_in_backward() -> None:
    """A mode sees `Tensor.backward` as a whole and is off below it, where hooks and Python run."""
    owner: Any = torch.autograd
    overrides: Any = torch.overrides
    original = owner.graph._engine_run_backward

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        modes = overrides._get_current_function_mode_stack()
        if any(isinstance(mode, _Widening) for mode in modes):
            return original(*args, **kwargs)
        with _Widening():
            return original(*args, **kwargs)

    owner._engine_run_backward = owner.graph._engine_run_backward = run


def _parsing(original: Callable[..., Any]) -> Callable[..., Any]:
    """What Module.to makes of its arguments, with the name that is among them."""

    @functools.wraps(original)
    def parse(*args: Any, **kwargs: Any) -> Any:
        device, dtype, *others = original(*args, **kwargs)
        given = (*args, *kwargs.values())
        named = [value for value in given if isinstance(value, torch.dtype)]
        named += [name_of(asked_of(v)) for v in given if isinstance(v, torch.Tensor)]
        if dtype is not None and named and not is_paused():
            dtype = named[0]
        return device, dtype, *others

    return parse


def _widening(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_paused():
            return original(*args, **kwargs)
        wanted = kwargs.get("dtype")
        if isinstance(wanted, torch.dtype):  # the bytes are of this dtype
            kwargs["dtype"] = asked(wanted)
        with torch._C.DisableTorchFunction():  # x.dtype is the real one
            made = original(*args, **kwargs)
            _see_outside(made)
            return _widened(made)

    return call


def _see_outside(value: Any) -> None:
    """Remembers the script's line, if numbers that training computes come from numpy there."""
    if _is_preparing or id(value.dtype) not in WIDE_OF:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_of_python(file) and not is_of_a_library(file):
            see_outside(f"{file.rpartition('/')[2]}:{frame.f_lineno}")
            return
        frame = frame.f_back


class _Widening(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_paused():
            return func(*args, **kwargs)
        if isinstance(func, _GETTERS):
            return _attribute(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in _CASTS and len(args) == 1:
            return _cast(args[0], _CASTS[name], kwargs)
        if name in _COMPLEX_CASTS:
            return args[0].to(torch.complex128)
        if name == "type":
            return _type(func, args, kwargs)
        if name in _OF_DTYPES_ALONE:
            return _answered_natively(func, args, kwargs)
        wanted = None
        if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
            wanted = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype))
            args = [_wide(value) for value in args]
            kwargs = {key: _wide(value) for key, value in kwargs.items()}
            see(asked(wanted))
        is_changed = _changes_its_first(name)  # a copy of the first argument would be changed
        args = [v if i == 0 and is_changed else _usable(v) for i, v in enumerate(args)]
        kwargs = {key: value if key == "out" else _usable(value) for key, value in kwargs.items()}
        if name == "to" and wanted is not None and isinstance(args[0], torch.Tensor):
            return _to(func, args, kwargs, asked(wanted))
        if name in ("to", "type_as") and len(args) > 1 and isinstance(args[1], torch.Tensor):
            return _to(func, args, kwargs, asked_of(args[1]))
        try:
            made = func(*args, **kwargs)
            if name in _OF_ARRAYS and hasattr(args[0] if args else None, "__array__"):
                _see_outside(made)
            result = _widened(made)
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
            elif has_tags() and not is_changed and not result._is_view():
                _tag_computed(result, [*args, *kwargs.values()])
        return result


def _attribute(get: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """x.dtype is the name of what was asked for, so that dtype=x.dtype asks for it again."""
    if get == _GET_DTYPE:
        return name_of(asked_of(args[0]))
    value = get(*args, **kwargs)
    if get == _GET_GRAD and value is not None and has_tags():
        tag(value, asked_of(args[0]))
    return value


def _changes_its_first(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))


def _tag_computed(result: torch.Tensor, values: list[Any]) -> None:
    """What is computed in one dtype natively is asked for in it; numbers decide nothing."""
    if not result.is_floating_point() or any(result is value for value in values):
        return
    parts = [p for v in values for p in (v if type(v) in (tuple, list) else (v,))]
    tensors = [p for p in parts if isinstance(p, torch.Tensor) and p.is_floating_point()]
    found = [asked_of(t) for t in tensors if t.ndim > 0] or [asked_of(t) for t in tensors]
    if found:
        tag(result, functools.reduce(torch.promote_types, found))


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


def _usable(value: Any) -> Any:
    """An argument of a call, where it is a tensor that was made behind torch's back.

    One that owns its memory becomes wide itself; a part of a graph or of another's memory is
    copied.
    """
    if isinstance(value, torch.Tensor):
        wide = WIDE_OF.get(id(value.dtype))
        if wide is None:
            return value
        if value.grad_fn is not None or value._is_view():
            return value.to(wide)
        become(value, _made_wide(value.detach(), wide))
        return value
    if type(value) in (tuple, list):
        parts = [_usable(part) for part in value]
        is_same = all(a is b for a, b in zip(parts, value, strict=True))
        return value if is_same else type(value)(parts)
    return value


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Gives a tensor the content of another one, of another dtype."""
    if not is_traceable_wrapper_subclass(tensor):
        tensor.data = other
        return
    needs_gradient = tensor.requires_grad  # .data would leave the tensors inside of it
    other = torch.nn.Parameter(other) if isinstance(tensor, torch.nn.Parameter) else other
    torch.utils.swap_tensors(tensor, other.requires_grad_(needs_gradient))


def _cast(tensor: torch.Tensor, to: torch.dtype, kwargs: dict[str, Any]) -> torch.Tensor:
    result: torch.Tensor = _to(torch.Tensor.to, [tensor, _DOUBLE], kwargs, to)
    return result


def _to(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], to: torch.dtype) -> Any:
    """A cast between dtypes that are two for the script makes a new tensor, as it would natively.

    What is written into the one must not be seen in the other.
    """
    see(to)
    tensor = args[0]
    result = func(*args, **kwargs)
    if _is_preparing and to is not asked_of(tensor) and _is_a_value(tensor):
        result = _rounded(result, to)
    if result is tensor and to is not asked_of(tensor) and tensor.is_floating_point():
        result = tensor.clone()
    if result is not tensor:
        tag(result, to)
    return result


def _is_a_value(tensor: torch.Tensor) -> bool:
    is_in_graph = tensor.grad_fn is not None or (torch.is_grad_enabled() and tensor.requires_grad)
    return tensor.is_floating_point() and not is_in_graph


def _rounded(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Weights that are cast before training begins are those of the native run.

    Their roundings belong to what is trained, and not to how.
    """
    return tensor.to(to).to(_DOUBLE) if to.is_floating_point else tensor


def _answered_natively(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """What torch says of the dtypes that were asked for; C++ knows only those of the memory."""

    def real(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(value.shape, dtype=asked_of(value), device="meta")
        return asked(value) if isinstance(value, torch.dtype) else value

    with real_names():
        answer = func(*map(real, args), **{key: real(value) for key, value in kwargs.items()})
    return name_of(answer) if isinstance(answer, torch.dtype) else answer


def _type(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """x.type() is the name of the type that the script would see; x.type(T) is a cast."""
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        text = func(*args, **kwargs)
        return text.replace("DoubleTensor", _TYPES.get(id(asked_of(args[0])), "DoubleTensor"))
    if isinstance(wanted, torch.dtype):
        return _to(torch.Tensor.to, [args[0], _wide(wanted)], {}, asked(wanted))
    text = wanted if isinstance(wanted, str) else f"{wanted.__module__}.{wanted.__name__}"
    for narrow in _TYPES.values():
        text = text.replace(narrow, "DoubleTensor")
    return func(args[0], text)
