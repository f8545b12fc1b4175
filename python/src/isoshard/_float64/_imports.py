# SPDX-License-Identifier: Apache-2.0
"""Modules of installed packages are imported with the real names, whenever that is.

Many build tables that are keyed by dtype, and with the new names all rows would be one. A module of
the script's own sees the new names (_tables names its tables).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ._names import real_names

_LIBRARIES = tuple(
    str(folder) + os.sep
    for folder in {
        *(sysconfig.get_path("purelib"), sysconfig.get_path("platlib")),
        *(*site.getsitepackages(), site.getusersitepackages()),
        *(Path(torch.__file__).parent, Path(__file__).parents[1]),
    }
)
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_afterwards: list[Callable[[str, Any], None]] = []


def load_owners_of_tables() -> None:
    """Has torch build the tables that it would build later, inside of functions, and keep."""
    storage: Any = torch.storage
    storage._dtype_to_storage_type_map()
    storage._storage_type_to_dtype_map()
    storage._new_dtypes()
    import torch._weights_only_unpickler as unpickler

    unpickler._get_allowed_globals()


def install() -> None:
    """From here on modules of libraries are imported with the real names."""
    sys.meta_path.insert(0, _WithRealNames())


def after_import(function: Callable[[str, Any], None]) -> None:
    """Has a function called with the name and the module after each import of a library's."""
    _afterwards.append(function)


class _WithRealNames(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, whose loader pauses the names; None for the script's modules."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None or not is_of_a_library(spec.origin):
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            with real_names():
                run(module)
            for function in _afterwards:
                function(fullname, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def is_of_a_library(file: str | None) -> bool:
    """Whether a file is of an installed package, or of this one."""
    return file is not None and file.startswith(_LIBRARIES)


def is_of_python(file: str) -> bool:
    """Whether a file is of Python's own library."""
    return file.startswith((_STDLIB, "<frozen")) and not is_of_a_library(file)
