# SPDX-License-Identifier: Apache-2.0
"""Python runs this first where the driver of `isoshard judge` put its folder on PYTHONPATH.

In the processes that train it waits for torch.optim, then installs isoshard._auto.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys


def _is_rank() -> bool:
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return any(n in os.environ for n in names) or "ISOSHARD_SINGLE" in os.environ


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Installs the recorder right after the last module that it needs was imported."""

    name = "torch.optim.optimizer"

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
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


def _wrap_first_optimizer(optimizer):  # type: ignore[no-untyped-def]
    """By the time of the first optimizer all of torch is there."""
    original = optimizer.__init__

    def init(self, *args, **kwargs):  # type: ignore[no-untyped-def]
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


if os.environ.get("ISOSHARD_AUTO") and _is_rank():
    sys.meta_path.insert(0, _AfterTorch())
_chain()
