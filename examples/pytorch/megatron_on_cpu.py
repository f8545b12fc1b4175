# SPDX-License-Identifier: Apache-2.0
"""Lets Megatron-Core 0.16 run on a CPU: its optimizers ask for the device "cuda" by name."""

import contextlib

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.overrides import TorchFunctionMode


class CpuForCuda(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        given = dict(kwargs or {})
        given |= {"device": "cpu"} if str(given.get("device")).startswith("cuda") else {}
        result = function(*args, **given)
        is_name = function is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.", 1) if is_name else result


def layer_norm(cls, config, hidden_size, eps=1e-5, **_):
    module = torch.nn.LayerNorm(hidden_size, eps)  # Megatron-Core's needs a GPU under `sp`
    module.weight.sequence_parallel = module.bias.sequence_parallel = config.sequence_parallel
    return module


torch.cuda.current_device = lambda: "cpu"
random.CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()
WrappedTorchNorm.__new__ = layer_norm
CpuForCuda().__enter__()
