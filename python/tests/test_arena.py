# SPDX-License-Identifier: Apache-2.0
"""Copies of a step's tensors in memory that the next step uses again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

pytestmark = pytest.mark.quick

_MANY = 1 << 16  # elements: more bytes than the least that the arena takes


def _tensors() -> list[Any]:
    whole = torch.arange(2 * _MANY, dtype=torch.float32).reshape(2, _MANY)
    return [
        whole,
        whole.t(),
        whole[:, 1::2],
        whole.to(torch.bfloat16),
        whole.to(torch.int64),
        whole > 7,
        torch.ones(3),
        torch.empty(0, 4),
        torch.tensor(2.0),
    ]


def test_copies_are_contiguous_and_equal_and_of_their_own() -> None:
    from isoshard._arena import Arena

    arena, tensors = Arena(), _tensors()
    copies = [arena.copy(tensor) for tensor in tensors]
    expected = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    assert all(copy.is_contiguous() for copy in copies)
    assert [copy.dtype for copy in copies] == [tensor.dtype for tensor in tensors]
    assert all(torch.equal(c, e) for c, e in zip(copies, expected, strict=True))


def test_memory_is_used_again_after_clear_and_not_before() -> None:
    from isoshard._arena import Arena

    arena = Arena()
    first = arena.copy(torch.ones(_MANY))
    second = arena.copy(torch.full((_MANY,), 2.0))
    assert first.sum() == _MANY
    arena.clear()
    third = arena.copy(torch.full((_MANY,), 3.0))
    assert third.data_ptr() == first.data_ptr()
    assert second.sum() == 2 * _MANY


def test_a_tensor_may_be_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from isoshard import _arena

    monkeypatch.setattr(_arena, "_BLOCK", 1 << 18)
    arena = _arena.Arena()
    sizes = (_MANY, 4 * _MANY, _MANY, _MANY // 2)
    copies = [arena.copy(torch.full((size,), float(i))) for i, size in enumerate(sizes)]
    assert [float(copy.sum()) for copy in copies] == [i * s for i, s in enumerate(sizes)]


def test_what_a_recording_holds_is_what_was_there(tmp_path: Path) -> None:
    """Gradients and parameters change after they are recorded; what two steps leave is right."""
    import isoshard
    from isoshard import _bundle

    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    wanted = []
    with isoshard.record(tmp_path / "run", model, optimizer):
        for step in range(2):
            before = model.weight.detach().clone()
            model(torch.full((4, 300), 1.0 + step)).square().mean().backward()
            gradient = model.weight.grad.clone()
            optimizer.step()
            momentum = optimizer.state[model.weight]["momentum_buffer"].clone()
            wanted.append((before, gradient, momentum, model.weight.detach().clone()))
            model.weight.grad.fill_(7.0)
            optimizer.zero_grad()
    names = ("grad/weight/0", "optimizer/weight.momentum_buffer/0", "param/weight/1")
    for step, (before, *others) in enumerate(wanted):
        kept = _bundle.read_tensors(tmp_path / "run", step, 0)
        after = names if step == 0 else (*names[:2], "param/weight/0")
        assert step > 0 or torch.equal(kept["param/weight/0"], before)
        assert all(torch.equal(kept[n], t) for n, t in zip(after, others, strict=True))
