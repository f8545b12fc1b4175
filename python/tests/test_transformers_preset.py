# SPDX-License-Identifier: Apache-2.0
"""What is known of transformers' tensor-parallel plans."""

from __future__ import annotations

from typing import Any

import torch

from isoshard import _transformers
from isoshard._options import Options
from isoshard._presets import with_preset


class Attention(torch.nn.Module):
    """As transformers' models with a plan for latent attention look from outside."""

    def __init__(self) -> None:
        super().__init__()
        self._tp_plan = {"layers.*.kv": "mla_kv_a_proj", "layers.*.id": "moe_identity_expert"}
        self.config: Any = type("Config", (), {"qk_rope_head_dim": 2})()


def test_a_latent_projection_is_recorded_in_two_parts() -> None:
    options = with_preset(Options(), Attention())
    assert options.transform is not None

    parts = options.transform("activation_grad", "layers.3.kv", torch.arange(5.0)[None])

    assert isinstance(parts, dict)
    assert {name: part.tolist() for name, part in parts.items()} == {
        "layers.3.kv.latent": [[0.0, 1.0, 2.0]],
        "layers.3.kv.rope": [[3.0, 4.0]],
    }
    assert options.layout("activation_grad", "layers.3.kv.rope") is not None
    assert options.layout("activation_grad", "layers.3.kv.latent") is None
    assert options.layout("activation", "layers.3.id") is not None


def test_other_tensors_of_such_a_model_stay_as_they_are() -> None:
    transform = _transformers.preset(Attention())
    value = torch.ones(1, 5)

    assert transform("param", "layers.3.kv", value) is value
    assert transform("activation", "layers.3.q", value) is value
    assert not _transformers.has_plan(torch.nn.Linear(1, 1))
