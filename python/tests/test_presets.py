# SPDX-License-Identifier: Apache-2.0
"""What is known of frameworks' local tensors, without the frameworks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import isoshard
from isoshard import UsageError, _bundle
from isoshard._megatron import is_megatron, megatron_settings, preset
from isoshard._options import Options
from isoshard._presets import with_preset
from isoshard._recorder import FlatPart, Recorder


def gpt(is_gated: bool = True, is_sequence_cut: bool = False) -> nn.Module:
    model = nn.ModuleDict({"linear_fc1": nn.Linear(2, 6)})
    model.config = SimpleNamespace(gated_linear_unit=is_gated, sequence_parallel=is_sequence_cut)  # type: ignore[assignment]
    model.reduce_scatter_embeddings = is_sequence_cut  # without learned positions
    return model


def test_halves_of_a_gated_projection_get_names_of_their_own() -> None:
    weight = torch.arange(12.0).reshape(6, 2)

    named = preset(gpt())("param", "layers.0.mlp.linear_fc1.weight", weight)

    assert list(named) == [
        "layers.0.mlp.linear_fc1.gate.weight",
        "layers.0.mlp.linear_fc1.up.weight",
    ]
    assert torch.equal(named["layers.0.mlp.linear_fc1.gate.weight"], weight[:3])
    state = preset(gpt())("optimizer", "mlp.linear_fc1.bias.exp_avg", torch.ones(6))
    assert list(state) == ["mlp.linear_fc1.gate.bias.exp_avg", "mlp.linear_fc1.up.bias.exp_avg"]


@pytest.mark.parametrize("shape", [[1], [2], [1, 2]])
def test_a_state_without_the_rows_of_its_parameter_stays_whole(shape: list[int]) -> None:
    state = torch.ones(shape)
    assert preset(gpt())("optimizer", "mlp.linear_fc1.weight.factor", state) is state


def test_a_factor_with_the_rows_of_its_parameter_is_cut() -> None:
    factor = torch.arange(6.0).reshape(6, 1)

    named = preset(gpt())("optimizer", "mlp.linear_fc1.weight.row_var", factor)

    assert torch.equal(named["mlp.linear_fc1.up.weight.row_var"], factor[3:])


def test_outputs_of_a_gated_projection_are_cut_along_their_last_dim() -> None:
    output = torch.arange(24.0).reshape(3, 2, 4)  # [s, b, f]

    named = preset(gpt())("activation", "mlp.linear_fc1", output)

    assert torch.equal(named["mlp.linear_fc1.up"], output.transpose(0, 1)[..., 2:])


@pytest.mark.parametrize(
    ("name", "is_gated"),
    [
        ("mlp.linear_fc1.weight", False),
        ("mlp.linear_fc1.layer_norm_weight", True),
        ("mlp.linear_fc2.weight", True),
    ],
)
def test_what_is_not_gated_stays_whole(name: str, is_gated: bool) -> None:
    weight = torch.ones(6, 2)
    assert preset(gpt(is_gated))("param", name, weight) is weight


@pytest.mark.parametrize(
    ("name", "shape", "is_sequence_cut", "is_turned"),
    [
        ("decoder.layers.0", [3, 2, 4], False, True),
        ("embedding.word_embeddings", [2, 3, 4], False, False),
        ("embedding.word_embeddings", [3, 2, 4], True, True),
        ("self_attention.core_attention.scale_mask_softmax", [2, 4, 3, 3], False, False),
        ("self_attention.q_layernorm", [3, 2, 4, 5], False, True),
    ],
)
def test_samples_come_first(
    name: str, shape: list[int], is_sequence_cut: bool, is_turned: bool
) -> None:
    result = preset(gpt(is_sequence_cut=is_sequence_cut))("activation", name, torch.ones(shape))
    wanted = [shape[1], shape[0], *shape[2:]] if is_turned else shape
    assert list(result.shape) == wanted


def test_a_users_transform_comes_behind_the_preset() -> None:
    def own(kind: str, name: str, tensor: torch.Tensor) -> Any:
        return None if ".gate" in name else tensor * 2

    options = with_preset(Options(preset="megatron", transform=own), gpt())

    assert options.transform is not None
    named = options.transform("param", "mlp.linear_fc1.weight", torch.ones(4, 2))
    assert isinstance(named, dict) and list(named) == ["mlp.linear_fc1.up.weight"]
    assert named["mlp.linear_fc1.up.weight"].eq(2).all()


def test_other_models_have_no_preset_of_their_own() -> None:
    assert not is_megatron(nn.Linear(2, 2))
    assert with_preset(Options(), nn.Linear(2, 2)).transform is None
    with pytest.raises(
        UsageError, match="preset must be one of auto, none, megatron, transformers, got 'x'"
    ):
        Options(preset="x")


def test_switches_are_read_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = megatron_settings(SimpleNamespace(deterministic_mode=True))
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")

    after = megatron_settings(SimpleNamespace(deterministic_mode=True))

    assert before["deterministic_mode"] is True
    assert "NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=1" in after["transformer_engine"]
    assert before["transformer_engine"] != after["transformer_engine"]


@pytest.mark.parametrize(("begin", "count", "parts"), [(4, 2, 1), (6, 0, 0)])
def test_a_flat_part_says_which_run_it_is(
    tmp_path: Path, begin: int, count: int, parts: int
) -> None:
    recorder = Recorder(tmp_path / "a")
    recorder.world_size = 2

    recorder.put("grad", "w", torch.ones(count), layout=FlatPart([3, 2], begin))

    record = recorder._entries[0].record
    assert record["global_shape"] == [3, 2] and record["local_shape"] == [count]
    wanted = [{"local_begin": 0, "global_begin": begin, "count": count}] * parts
    assert record["flat"] == wanted


def test_one_process_has_the_whole_of_a_flat_part(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a")

    recorder.put("grad", "w", torch.arange(6.0), layout=FlatPart([3, 2], 0))

    entry = recorder._entries[0]
    assert list(entry.tensor.shape) == [3, 2] and "flat" not in entry.record


class Counting(TorchFunctionMode):
    """A mode makes torch.autograd.backward call itself again."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def test_a_loss_counts_once_under_a_function_mode(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Counting(), isoshard.record(tmp_path / "a", model, optimizer):
        loss = model(torch.ones(2, 3)).mean()
        torch.autograd.backward(loss)
        optimizer.step()

    recorded = _bundle.read_tensors(tmp_path / "a", 0, 0)["scalar/loss/0"]
    assert recorded.item() == pytest.approx(loss.item())
