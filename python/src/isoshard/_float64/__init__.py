# SPDX-License-Identifier: Apache-2.0
"""Runs a script in float64 without changing it: `isoshard judge --precision float64`.

`enter` turns this process into one whose floating-point numbers are float64, for good. Roundings
are then so small that a wrong factor of 1 + 1e-9 is seen. The modules, in the order of their work:

_names         torch.float32, bfloat16, half, ... are float64, and remember what was asked for
_copies        modules that imported a name or a function by name are found
_imports       libraries are imported with the real names
_tables        places where two dtypes are one key are named
_strays        narrow tensors that come from elsewhere (numpy, old constructors) are widened
_draws         random numbers are drawn in the dtype that was asked for, then widened
_readers       files are read with the real names, then widened
_kernels       operations that have no float64 kernel get one
_switched_off  torch.compile, autocast, GradScaler and compressed reductions do nothing

Branches on dtypes take the way of every dtype at once (all names are equal), casts round nothing,
and byte sizes are those of float64. The native run judges these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import (
    _copies,
    _draws,
    _imports,
    _kernels,
    _names,
    _notes,
    _readers,
    _strays,
    _switched_off,
    _tables,
)

__all__ = ["begin_program", "enter", "is_on", "leaving_notes", "look_ahead", "write_notes"]


def look_ahead() -> None:
    """Does what is slow in `enter` for all processes that are forked from this one."""
    _imports.load_owners_of_tables()
    _copies.look_ahead([*_names.narrow_dtypes(), *_readers.readers()])


def enter() -> None:
    """Turns this process into float64. torch must be imported, the script must not have begun."""
    if is_on():
        return
    _imports.load_owners_of_tables()
    _names.install()
    _tables.install()
    _imports.install()
    _readers.install()
    _draws.install()
    _kernels.install()
    _switched_off.install()
    _strays.install()


def begin_program() -> None:
    """Another program begins in this process: it makes weights before it builds an optimizer."""
    if is_on():
        _strays.prepare()


def is_on() -> bool:
    """Whether `enter` was called in this process, or in the one that forked it."""
    return _names.is_installed()


def write_notes(folder: Path, rank: int) -> None:
    """Leaves in a folder what the mode changed in this process, for the driver."""
    _notes.write_notes(folder, rank)


@contextmanager
def leaving_notes(folder: Path, rank: int) -> Iterator[None]:
    """Leaves in a folder what the mode changed in the block, also where it fails."""
    if not is_on():
        yield
        return
    _notes.forget()
    begin_program()
    try:
        yield
    finally:
        _notes.write_notes(folder, rank)
