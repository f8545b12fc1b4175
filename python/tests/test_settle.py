# SPDX-License-Identifier: Apache-2.0
"""Differences of right runs that no tolerance is for: last bits of inputs, gradients of zeros."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_evidence import judged

from isoshard._settle import _nearest

pytestmark = pytest.mark.usefixtures("judge_program")

_ENCODED = """
encoder = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(),
                        nn.Linear(64, 16)).requires_grad_(False)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x in batches:
    part = x.chunk(world)[rank]
    # Products of another number of rows are added up in another order.
    part_encoded = encoder(part) if world == 1 else torch.stack([encoder(r) for r in part])
    nn.functional.mse_loss(model(part_encoded {wrong}), part.flip(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("wrong", "code"), [("", 0), ("* (1 + 1e-3 * rank)", 1)])
def test_last_bits_of_a_computed_input_are_no_difference(
    tmp_path: Path, wrong: str, code: int
) -> None:
    found, verdict = judged(tmp_path, _ENCODED.format(wrong=wrong))
    assert found == code, verdict["reason"]
    if code:
        assert verdict["findings"][0]["stage"] == "data ids"


_UNUSED = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), {unused}

    def forward(self, x):
        return self.a(x)


model = nn.parallel.DistributedDataParallel(Two(), find_unused_parameters=True)
unused = [p for name, p in model.named_parameters() if "module.b" in name]
optimizer = {optimizer}
for step, x in enumerate(batches):
    part = x.chunk(world)[rank]
    nn.functional.mse_loss(model(part), part.flip(1)).backward()
    for p in model.parameters():
        if p.grad is None and {who}:
            p.grad = torch.full_like(p, {value})
    optimizer.step()
    optimizer.zero_grad()
"""
_LINEAR, _NUMBER = "nn.Linear(16, 16)", "nn.Parameter(torch.ones(1))"
_SGD = "torch.optim.SGD(model.parameters(), lr=0.1)"
_STANDING = """torch.optim.SGD([
    {"params": model.module.a.parameters(), "lr": 0.1}, {"params": unused, "lr": 0.0}])"""
_ADAM = "torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)"
_DECAYING = "torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)"


@pytest.mark.parametrize(
    ("who", "value", "optimizer", "unused", "code"),
    [
        ("world > 1", "0.0", _SGD, _LINEAR, 0),
        ("world == 1", "0.0", _SGD, _LINEAR, 0),
        ("world > 1", "1e-3", _SGD, _LINEAR, 1),
        ("world == 1", "1e-3", _SGD, _LINEAR, 1),
        ("world > 1", "0.0", _ADAM, _NUMBER, 0),
        ("world == 1", "0.0", _ADAM, _LINEAR, 0),
        ("world == 1", "0.0", _ADAM, _NUMBER, 0),
        ("world > 1", "0.0", _DECAYING, _LINEAR, 1),
        ("world == 1", "0.0", _DECAYING, _LINEAR, 1),
        ("world == 1", "1e-3 * step", _STANDING, _LINEAR, 1),
        ("world > 1", "1e-3", _STANDING, _NUMBER, 1),
    ],
    ids=[
        "run",
        "reference",
        "not zero in run",
        "not zero in reference",
        "states in run",
        "states in reference",
        "states of a number in reference",
        "decayed in run",
        "decayed in reference",
        "zero in one step alone",
        "a number that is not zero",
    ],
)
def test_zeros_in_place_of_no_gradient_and_no_state_are_told(
    tmp_path: Path, who: str, value: str, optimizer: str, unused: str, code: int
) -> None:
    body = _UNUSED.format(who=who, value=value, optimizer=optimizer, unused=unused)
    found, verdict = judged(tmp_path, body)
    assert found == code, verdict["reason"]


@pytest.mark.parametrize(
    ("dtype", "right", "wrong", "is_near"),
    [
        (torch.float32, [1.0, 0.5, 0.2], [1.0, 0.5, 0.2 + 1e-7], True),
        (torch.float32, [1e6, 0.5, 0.2], [1e6, 0.0, 0.0], False),
        (torch.float32, [-3.4e38, -0.5, -0.25], [-3.4e38, -0.125, -0.0625], False),
        (torch.bfloat16, [i / 255 for i in range(256)], [i / 256 for i in range(256)], False),
    ],
)
def test_an_element_is_near_by_its_own_size(
    dtype: torch.dtype, right: list[float], wrong: list[float], is_near: bool
) -> None:
    found, _ = _nearest(torch.tensor([right], dtype=dtype), torch.tensor([wrong], dtype=dtype))
    assert (found is not None) == is_near
