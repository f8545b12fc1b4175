# SPDX-License-Identifier: Apache-2.0
"""Lets Megatron-Core 0.16 run on a CPU: its optimizers ask for the device "cuda" by name."""
import contextlib

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.overrides import TorchFunctionMode


class CpuForCuda(TorchFunctionMode):
    """Makes tensors on the CPU where "cuda" is asked for; CPU tensors say that they are CUDA's."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        is_name = function is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.", 1) if is_name else result


def norm(cls, config, hidden_size, eps=1e-5, **_):
    """Torch's LayerNorm; Megatron-Core's own has no sequence parallelism without a GPU."""
    module = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return module


torch.cuda.current_device = lambda: "cpu"
random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
WrappedTorchNorm.__new__ = norm
CpuForCuda().__enter__()
