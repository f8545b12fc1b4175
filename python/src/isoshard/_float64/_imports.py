# SPDX-License-Identifier: Apache-2.0
"""Modules of installed packages are imported with the real names, whenever that is.

Many build tables that are keyed by dtype, and with the new names all rows would be one. A module of
the script's own sees the new names; its tables are named in the verdict.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ._names import real_names
from ._notes import note

_FLOATS = {"float32", "float", "bfloat16", "float16", "half", "float64", "double"}
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_STDLIB = sysconfig.get_path("stdlib")
_OWN = str(Path(__file__).parents[1])
_imported_before: set[str] = set()
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
    _imported_before.update(sys.modules)
    sys.meta_path.insert(0, _WithRealNames())


def after_import(function: Callable[[str, Any], None]) -> None:
    """Has a function called with the name and the module after each import of a library's."""
    _afterwards.append(function)


def replace_copies(replaced: Mapping[int, Any]) -> None:
    """Puts objects in place of others, by id, in all modules that imported these by name."""
    if not replaced:
        return
    for module in list(sys.modules.values()):
        content = getattr(module, "__dict__", {})
        for name in [n for n, value in content.items() if id(value) in replaced]:
            content[name] = replaced[id(content[name])]


class _WithRealNames(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, whose loader pauses the names; None for the script's modules."""
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None or not _is_of_a_library(spec.origin):
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            with real_names():
                run(module)
            for function in _afterwards:
                function(fullname, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _is_of_a_library(origin: str | None) -> bool:
    return origin is not None and origin.startswith((*_LIBRARIES, _OWN))


def tell_collapsed_tables() -> None:
    """Names each table of the script's modules whose rows for several dtypes became one."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is None or name in _imported_before - {"__main__"} or _is_of_a_library(path):
            continue
        if path.startswith(_STDLIB):
            continue
        for line in _tables_keyed_by_dtype(Path(path)):
            note(f"the table at {Path(path).name}:{line} has one row for all dtypes")


def _tables_keyed_by_dtype(path: Path) -> list[int]:
    """Lines of the dict displays that have rows for two dtypes or more."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict) and sum(map(_is_a_dtype, node.keys)) > 1
    ]


def _is_a_dtype(node: ast.expr | None) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        and node.attr in _FLOATS
    )
