# SPDX-License-Identifier: Apache-2.0
"""Python runs this first where the driver of `isoshard judge` put its folder on PYTHONPATH.

It waits until a process builds an optimizer, then installs isoshard._auto there.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Wraps Optimizer right after its module was imported."""

    name = "torch.optim.optimizer"

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, whose loader wraps the class."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(fullname)
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _wrap_first_optimizer(module.Optimizer)

        spec.loader.exec_module = exec_module
        return spec


def _install() -> None:
    try:
        from isoshard._auto import install_from_environment
    except ImportError:  # the launcher's Python is another one: the package's files will do
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        sys.path.append(os.path.dirname(package))
        from isoshard._auto import install_from_environment
    install_from_environment()


def _wrap_first_optimizer(optimizer: Any) -> None:
    """By the time of the first optimizer all of torch is there."""
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
    sys.meta_path.insert(0, _AfterTorch())
_chain()
