# SPDX-License-Identifier: Apache-2.0
"""Python runs this first where the driver of `isoshard judge` put its folder on PYTHONPATH.

It waits until a process builds an optimizer, then installs isoshard._auto there. Float64 must begin
earlier: right after torch was imported.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any


class _After(importlib.abc.MetaPathFinder):
    """Calls a function with a module right after it was imported."""

    def __init__(self, name: str, function: Callable[[Any], None]) -> None:
        self.name, self.function = name, function

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, whose loader calls the function."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(fullname)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self.function(module)

        spec.loader.exec_module = exec_module
        return spec


def _find_package() -> None:
    """Where the launcher's Python is another one, the package's files will do."""
    if importlib.util.find_spec("isoshard") is None:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        sys.path.append(os.path.dirname(package))


def _install() -> None:
    _find_package()
    from isoshard._auto import install_from_environment

    install_from_environment()


def _enter_float64(torch: Any) -> None:
    _find_package()
    from isoshard import _float64

    _float64.enter()


def _wrap_first_optimizer(module: Any) -> None:
    """By the time of the first optimizer all of torch is there."""
    optimizer = module.Optimizer
    original = optimizer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        optimizer.__init__ = original
        _install()
        optimizer.__init__(self, *args, **kwargs)

    optimizer.__init__ = init


def _chain() -> None:
    """Runs the sitecustomize that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [p for p in sys.path if os.path.abspath(p or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("ISOSHARD_AUTO"):
    sys.meta_path.insert(0, _After("torch.optim.optimizer", _wrap_first_optimizer))
    if json.loads(os.environ["ISOSHARD_AUTO"]).get("precision") == "float64":
        sys.meta_path.insert(0, _After("torch", _enter_float64))
_chain()
