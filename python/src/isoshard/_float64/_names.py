# SPDX-License-Identifier: Apache-2.0
"""torch.float32, torch.bfloat16 and the others as names for float64.

A name is a torch.dtype object of its own: torch computes in float64 where it is given one, and it
is equal to torch.float64. What the script asked for can still be told, because the object is
another one. torch makes no such objects, so a name is a copy of the narrow dtype's object with
float64's number in it, and torch.dtype gets an equality that knows the names.

All names are equal to float64, and so is what C++ code makes. Two names are equal to each other if
one of them may stand for the other: a tensor that C++ code made in 16 bits has the name of float32,
so that float32's name is every name's equal as soon as the program has something of 16 bits.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch

from ..errors import RunError
from ._copies import copies_of
from ._notes import has_seen_16_bits, see_made

#: Attributes of torch, the dtype that they name, and the one that stands for it.
_NARROW = {
    torch.float32: (("float32", "float"), torch.float64),
    torch.bfloat16: (("bfloat16",), torch.float64),
    torch.float16: (("float16", "half"), torch.float64),
    torch.complex64: (("complex64", "cfloat"), torch.complex128),
    torch.complex32: (("complex32", "chalf"), torch.complex128),
}
_TYPES = ("FloatTensor", "HalfTensor", "BFloat16Tensor")
_EQUAL, _NOT_EQUAL = 2, 3  # as CPython numbers them
_SIZE = ctypes.sizeof(ctypes.c_void_p)
_TP_HASH, _TP_RICHCOMPARE = 15 * _SIZE, 25 * _SIZE  # in a PyTypeObject of CPython 3.9 to 3.14
_HEAD = object.__basicsize__

#: id of a real narrow dtype -> the wide one; keys are ids, so that no equality is asked.
WIDE_OF: dict[int, torch.dtype] = {}
_name_of: dict[int, torch.dtype] = {}  # id of a real dtype -> its name
_asked_of_name: dict[int, torch.dtype] = {}  # id of a name -> the real dtype
_kept: list[Any] = []  # what C code points at
_set_default = torch.set_default_dtype
_get_default = torch.get_default_dtype
_FLOAT32 = torch.float32
_asked_by_default = _FLOAT32
_lock = threading.Lock()
_num_paused = 0  # threads
_originals: dict[tuple[Any, str], Any] = {}
#: Called with two dtypes that are equal here and not for the script, and the frame that asked.
on_one_key: Callable[[torch.dtype, torch.dtype, FrameType | None], None] | None = None


class _Here(threading.local):
    """What is true in one thread."""

    is_paused = False


_here = _Here()


def is_installed() -> bool:
    """Whether the names stand for float64 in this process."""
    return bool(_name_of)


def is_paused() -> bool:
    """Whether code of a library or of a reader runs in this thread, with the real names."""
    return _here.is_paused


def asked(dtype: torch.dtype) -> torch.dtype:
    """The real dtype that a script means by this object."""
    return _asked_of_name.get(id(dtype), dtype)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype that stands for a real one; one that is wide or no number stands for itself."""
    return WIDE_OF.get(id(dtype), dtype)


def name_of(dtype: torch.dtype) -> torch.dtype:
    """The name that stands for a real dtype; a dtype that has none is its own."""
    return _name_of.get(id(dtype), dtype)


def asked_by_default() -> torch.dtype:
    """What torch.get_default_dtype would be."""
    return _asked_by_default


def narrow_dtypes() -> list[torch.dtype]:
    """The dtypes that get another name."""
    return list(_NARROW)


def install() -> None:
    """Puts the names in place of the dtypes in torch and in all modules that took them."""
    global _asked_by_default
    _asked_by_default = torch.get_default_dtype()
    names = {narrow: _made_name(narrow, wide) for narrow, (_, wide) in _NARROW.items()}
    for narrow, name in names.items():
        attributes, wide = _NARROW[narrow]
        WIDE_OF[id(narrow)], _name_of[id(narrow)] = wide, name
        _asked_of_name[id(name)] = narrow
        for attribute in attributes:
            _originals[torch, attribute] = narrow
    _set_equality()
    for owner in (torch, torch.cuda):
        for kind in _TYPES:
            if hasattr(owner, kind):
                _originals[owner, kind] = getattr(owner, kind)
    torch.set_default_dtype, torch.get_default_dtype = _set_default_dtype, _get_default_dtype
    _rebind_copies()
    _switch(to_names=True)


@contextmanager
def real_names() -> Iterator[None]:
    """In the block the names are the dtypes of torch again, and nothing is widened.

    Other threads see the real names, too, but what they pass to torch is widened.
    """
    global _num_paused
    if not is_installed() or is_paused():
        yield
        return
    with _lock:
        _num_paused += 1
        if _num_paused == 1:
            _switch(to_names=False)
    _here.is_paused = True
    try:
        yield
    finally:
        _here.is_paused = False
        with _lock:
            _num_paused -= 1
            if _num_paused == 0:
                _switch(to_names=True)


def _switch(*, to_names: bool) -> None:
    for (owner, attribute), original in _originals.items():
        if not to_names:
            value = original
        elif isinstance(original, torch.dtype):
            value = name_of(original)
        else:
            value = owner.DoubleTensor
        setattr(owner, attribute, value)
    default = _asked_by_default
    _set_default(wide_of(default) if to_names else default)


def _set_default_dtype(dtype: torch.dtype) -> None:
    """torch.set_default_dtype, which remembers what was asked for."""
    global _asked_by_default
    if is_paused():
        _set_default(dtype)
        return
    _asked_by_default = asked(dtype)
    see_made(_asked_by_default)
    _set_default(wide_of(_asked_by_default))


def _get_default_dtype() -> torch.dtype:
    return _get_default() if is_paused() else name_of(_asked_by_default)


def _rebind_copies() -> None:
    """Modules outside torch that wrote `from torch import float32` before get the names, too."""
    wanted = {name for attributes, _ in _NARROW.values() for name in attributes}
    for path, content, name in copies_of(_name_of.keys()):
        if name in wanted and path.split(".")[0] not in ("torch", "isoshard"):
            content[name] = name_of(content[name])


def _made_name(narrow: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """A copy of the narrow dtype's object that has the number of the wide one."""
    size = torch.dtype.__basicsize__ - _HEAD
    content = bytearray(ctypes.string_at(id(narrow) + _HEAD, size))
    content[0] = ctypes.string_at(id(wide) + _HEAD, 1)[0]
    allocate = ctypes.pythonapi.PyType_GenericAlloc
    allocate.restype, allocate.argtypes = ctypes.py_object, [ctypes.py_object, ctypes.c_ssize_t]
    name: torch.dtype = allocate(torch.dtype, 0)
    ctypes.memmove(id(name) + _HEAD, bytes(content), size)
    _kept.append(name)
    return name


def _identity(dtype: Any) -> int:
    """The id of the dtype that an object is taken for."""
    real = asked(dtype)
    if _here.is_paused and real is dtype:
        return id(dtype)
    return id(wide_of(real))


def _are_told_apart(a: Any, b: Any) -> bool:
    """Whether two names are surely two dtypes for the script, as the settings of a library are."""
    first, second = _asked_of_name.get(id(a)), _asked_of_name.get(id(b))
    if first is None or second is None or first is second or first.is_complex:
        return False
    is_of_16_bits = first is not _FLOAT32 and second is not _FLOAT32
    return is_of_16_bits or not has_seen_16_bits()


def _set_equality() -> None:
    """Makes each name, and each real narrow dtype, equal to its wide dtype, with the same hash.

    Tables that libraries built before keep a row for each dtype; what is looked up finds the row of
    the wide one. While the names are paused, the real dtypes are told apart again.
    """
    is_known = sys.implementation.name == "cpython" and sys.version_info[:2] <= (3, 14)
    if not is_known or _SIZE != 8 or not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise RunError(
            "--precision float64 must run on CPython 3.14 or older, of 64 bits and with a GIL, got "
            f"{sys.version}. Judge with --precision native."
        )
    hashes = {id(d): hash(d) for d in vars(torch).values() if isinstance(d, torch.dtype)}

    def compare(a: Any, b: Any, operator: int) -> Any:
        if operator not in (_EQUAL, _NOT_EQUAL) or not isinstance(b, torch.dtype):
            return NotImplemented
        is_equal = _identity(a) == _identity(b) and not _are_told_apart(a, b)
        if is_equal and on_one_key and not is_paused() and asked(a) is not asked(b):
            with suppress(Exception):  # nobody above could catch it
                on_one_key(a, b, sys._getframe(1))
        return is_equal == (operator == _EQUAL)

    def hash_of(a: Any) -> int:
        identity = _identity(a)
        return hashes.get(identity, identity >> 4)

    compare_type = ctypes.PYFUNCTYPE(
        ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_int
    )
    hash_type = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, ctypes.py_object)
    functions = (hash_type(hash_of), compare_type(compare))
    _kept.append(functions)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(functions))  # the type outlives this module
    for offset, function in zip((_TP_HASH, _TP_RICHCOMPARE), functions, strict=True):
        slot = ctypes.c_void_p.from_address(id(torch.dtype) + offset)
        slot.value = ctypes.cast(function, ctypes.c_void_p).value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.dtype))
