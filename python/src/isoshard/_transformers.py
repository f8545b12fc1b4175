# SPDX-License-Identifier: Apache-2.0
"""What transformers' tensor-parallel plans leave as partial sums behind their own modules.

`mla_kv_a_proj`: the module's output is a latent part, whose gradient is whole on all ranks, and a
rotary part, whose gradient is summed over tp inside of the module, in front of where a hook on it
looks. So the two are recorded apart. `moe_identity_expert`: each rank's output is divided by tp,
because the ranks' experts are added up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from ._names import unwrapped
from ._options import Layout, Transform

_LATENT, _IDENTITY = "mla_kv_a_proj", "moe_identity_expert"
_SAMPLES = {"dp": 0, "dp_replicate": 0, "dp_shard": 0}


def _plan(module: torch.nn.Module) -> dict[str, str]:
    """Module names, with * for numbers, of the styles that need a word."""
    plan: Any = getattr(unwrapped(module), "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    return {str(k): str(v) for k, v in plan.items() if v in (_LATENT, _IDENTITY)}


def has_plan(module: torch.nn.Module) -> bool:
    """Whether a module is one of transformers with such a style in its plan."""
    inner: Any = unwrapped(module)
    return hasattr(inner, "config") and bool(_plan(module))


def layouts(module: torch.nn.Module) -> dict[str, Layout]:
    """Which of the recorded tensors are summands over tp."""
    summed: Layout = {**_SAMPLES, "tp": "sum"}
    found: dict[str, Layout] = {}
    for name, style in _plan(module).items():
        is_latent = style == _LATENT
        found[f"activation_grad/{name}.rope" if is_latent else f"activation/{name}"] = summed
    return found


def preset(module: torch.nn.Module) -> Transform:
    """A transform (level 2) that records the two parts of a latent projection apart."""
    names = {name for name, style in _plan(module).items() if style == _LATENT}
    config: Any = unwrapped(module).config
    rope = int(getattr(getattr(config, "get_text_config", lambda: config)(), "qk_rope_head_dim", 0))

    def transform(kind: str, name: str, tensor: torch.Tensor) -> Any:
        is_activation = kind in ("activation", "activation_grad")
        if not is_activation or rope < 1 or re.sub(r"\d+", "*", name) not in names:
            return tensor
        latent, rotary = tensor[..., :-rope], tensor[..., -rope:]
        return {f"{name}.latent": latent, f"{name}.rope": rotary}

    return transform
