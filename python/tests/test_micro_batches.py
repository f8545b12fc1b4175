# SPDX-License-Identifier: Apache-2.0
"""What becomes of a tensor's micro-batches; places of what no sample decides; parts of latents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isoshard import _transformers
from isoshard._bundle import Entry
from isoshard._mesh import Mesh
from isoshard._micro_batches import merged
from isoshard._options import Options
from isoshard._places import _data_axes, readings_of
from isoshard._presets import with_preset


def entry(kind: str, value: torch.Tensor, micro: int, call: int = 0) -> Entry:
    record = {"kind": kind, "name": "at", "call": call, "local_shape": list(value.shape)}
    return Entry(record, value, micro)


def step_of(output: torch.Tensor, samples: int) -> list[Entry]:
    """Two micro-batches of other ids, with the same output and gradients of 1 and 2."""
    return [
        made
        for micro in (0, 1)
        for made in (
            entry("data_id", torch.full((samples, 3), micro), micro),
            entry("activation", output, micro),
            entry("activation_grad", torch.full(output.shape, micro + 1.0), micro),
        )
    ]


def by_kind(entries: list[Entry]) -> dict[str, torch.Tensor]:
    return {e.record["kind"]: e.tensor for e in entries}


def test_what_no_sample_decides_is_kept_once_and_its_gradients_are_added() -> None:
    found = by_kind(merged(step_of(torch.arange(6.0).reshape(1, 3, 2), samples=2)))

    assert found["activation"].shape == (1, 3, 2)
    assert torch.equal(found["activation_grad"], torch.full((1, 3, 2), 3.0))


@pytest.mark.parametrize(("rows", "samples"), [(2, 2), (4, 2), (1, 1)])
def test_rows_of_samples_are_joined_even_if_they_are_equal(rows: int, samples: int) -> None:
    found = by_kind(merged(step_of(torch.ones(rows, 3, 2), samples)))

    assert found["activation"].shape == (2 * rows, 3, 2)
    assert found["activation_grad"].shape == (2 * rows, 3, 2)


def test_outputs_that_differ_between_micro_batches_are_joined() -> None:
    entries = step_of(torch.ones(1, 3, 2), samples=2)
    entries[4] = entry("activation", torch.zeros(1, 3, 2), 1)

    assert by_kind(merged(entries))["activation_grad"].shape == (2, 3, 2)


def test_gradients_are_counted_from_0_where_an_earlier_output_has_none() -> None:
    only = merged([entry("activation_grad", torch.ones(2), 0, call=1)])

    assert [e.record["call"] for e in only] == [0]


@pytest.mark.parametrize(("local", "axes"), [([1, 3, 2], ("dp",)), ([2, 3, 2], ())])
def test_a_gradient_that_samples_do_not_cut_may_be_a_sum_over_them(
    local: list[int], axes: tuple[str, ...]
) -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    whole = [4, 3, 2] if local[0] == 2 else local
    readings = readings_of([local] * 4, whole, mesh, "activation_grad")

    assert _data_axes(readings[0], mesh) == axes


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
