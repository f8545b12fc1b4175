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


def test_what_changes_before_a_step_ends_is_recorded_as_it_was(tmp_path: Path) -> None:
    """Steps change parameters, clipping changes gradients, and a second step changes moments."""
    import isoshard
    from isoshard import _bundle

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    first, last = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in model)
    weight, wanted = model[0].weight, []
    with isoshard.record(tmp_path, model, [first, last]):
        for step in range(2):
            values = {"param/0.weight/0": weight.detach().clone()} if step == 0 else {}
            model(torch.full((4, 300), 1.0 + step)).square().mean().backward()
            values["grad/0.weight/0"] = weight.grad.clone()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            for call in range(2):
                first.step()
                moment = first.state[weight]["momentum_buffer"].clone()
                values[f"optimizer/0.weight.momentum_buffer/{call}"] = moment
            values[f"param/0.weight/{1 - step}"] = weight.detach().clone()
            last.step()
            for parameter in model.parameters():
                parameter.grad.fill_(7.0)
            wanted.append(values)
    for step, values in enumerate(wanted):
        kept = _bundle.read_tensors(tmp_path, step, 0)
        assert [name for name, value in values.items() if not torch.equal(kept[name], value)] == []
        moments = [values[f"optimizer/0.weight.momentum_buffer/{call}"] for call in range(2)]
        assert not torch.equal(*moments)


def test_what_nothing_changes_any_more_is_written_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and moments after the last step of a step's last optimizer."""
    import isoshard
    from isoshard import _bundle

    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    first, last = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in model)
    places: dict[str, int] = {}
    write = _bundle.write_rank

    def look(folder: Path, run: str, rank: int, step: int, entries: Any, journal: Any) -> None:
        places.update({entry.tensor_name: entry.tensor.data_ptr() for entry in entries})
        write(folder, run, rank, step, entries, journal)

    monkeypatch.setattr(_bundle, "write_rank", look)
    with isoshard.record(tmp_path, model, [first, last]):
        model(torch.ones(4, 300)).square().mean().backward()
        gradient = model[0].weight.grad
        first.step()
        last.step()
    kept = {
        "param/0.weight/0": model[0].weight,
        "param/0.weight/1": model[0].weight,
        "param/1.weight/1": model[1].weight,
        "grad/0.weight/0": gradient,
        "optimizer/0.weight.momentum_buffer/0": first.state[model[0].weight]["momentum_buffer"],
        "optimizer/1.weight.momentum_buffer/0": last.state[model[1].weight]["momentum_buffer"],
    }
    shared = {name for name, tensor in kept.items() if places[name] == tensor.data_ptr()}
    assert shared == {
        "param/0.weight/1",
        "param/1.weight/1",
        "optimizer/1.weight.momentum_buffer/0",
    }
