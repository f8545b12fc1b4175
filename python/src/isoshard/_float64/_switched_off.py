# SPDX-License-Identifier: Apache-2.0
"""What has no meaning in float64, or no kernels, does nothing; a note says so."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ._names import asked
from ._notes import note, see


def install() -> None:
    """Replaces torch.compile, autocast, gradient scalers and reductions that compress."""
    _install_compile()
    _install_autocast()
    _install_scaler()
    _install_compressed_reductions()


def _install_compile() -> None:
    """Inductor's code for the new names is wrong, and its caches would keep it for native runs."""

    def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        note("torch.compile was left out: its code is judged by the native run only")
        return (lambda function: function) if model is None else model

    def compile_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        compile(module)

    torch.compile = compile
    kind: Any = torch.nn.Module
    kind.compile = compile_module
    # What was compiled before this runs as it is, too.
    os.environ.update(TORCHDYNAMO_DISABLE="1", TORCH_COMPILE_DISABLE="1")
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.disable = True


def _install_autocast() -> None:
    kind: Any = torch.amp.autocast_mode.autocast
    init = kind.__init__

    @functools.wraps(init)
    def new_init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any, **kw: Any
    ) -> None:
        if enabled:
            note("autocast was switched off: all is computed in float64")
            see(torch.bfloat16 if dtype is None else asked(dtype))
        init(self, device_type, enabled=False)

    kind.__init__ = new_init


def _install_scaler() -> None:
    kind: Any = torch.amp.grad_scaler.GradScaler
    init = kind.__init__

    @functools.wraps(init)
    def new_init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        if kwargs.get("enabled", True):
            note("GradScaler was switched off: float64 needs no scale")
        init(self, device, enabled=False)

    kind.__init__ = new_init


def _install_compressed_reductions() -> None:
    """DDP's built-in hooks cast in C++, where no name is seen."""
    from torch.nn.parallel import DistributedDataParallel

    kind: Any = DistributedDataParallel
    register: Callable[..., Any] = kind._register_builtin_comm_hook

    @functools.wraps(register)
    def new_register(self: Any, comm_hook_type: Any) -> None:
        untyped: Any = torch.distributed
        note("DDP's built-in compression was left out: gradients are reduced in float64")
        register(self, untyped.BuiltinCommHookType.ALLREDUCE)

    kind._register_builtin_comm_hook = new_register
