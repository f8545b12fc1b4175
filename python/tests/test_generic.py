# SPDX-License-Identifier: Apache-2.0
"""Random moves of all weights: the same in every layout, and none is 0 or 1 afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_evidence import judged
from test_judge import EXAMPLES, judge
from torch import nn

import isoshard
from isoshard import RecordError, _bundle
from isoshard._generic import move_generically
from isoshard._mesh import Mesh
from isoshard._options import Options


class Net(nn.Module):
    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.out = nn.LayerNorm(5), nn.Linear(5, 6)
        nn.init.zeros_(self.out.bias)
        self.scalar = nn.Parameter(torch.tensor(0.0))
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


def moved(options: Options | None = None, *, rank: int = 0, rows: slice = slice(None)) -> nn.Module:
    model = Net()
    model.out.weight = nn.Parameter(model.out.weight.detach()[rows].clone())
    move_generically(model, options=options, mesh=Mesh({"dp": 2, "tp": 3}), rank=rank)
    return model


def test_no_weight_is_special_and_the_move_repeats() -> None:
    plain, first, second = Net(), moved(), moved()
    for name, value in first.named_parameters():
        assert torch.equal(value, second.get_parameter(name)), name
        assert not ((value == 0) | (value == 1) | (value == plain.get_parameter(name))).any(), name
    assert len(set(first.norm.weight.tolist())) == 5
    assert not torch.equal(first.norm.weight - 1, first.norm.bias)
    relative = (first.out.weight / plain.out.weight - 1).abs()
    assert 0.01 < float(relative.mean()) < 0.2


@pytest.mark.parametrize("rank", range(6))
def test_a_part_gets_the_moves_of_its_place(rank: int) -> None:
    whole = moved()
    rows = slice(rank % 3 * 2, rank % 3 * 2 + 2)
    part = moved(Options(layouts={"param/out.weight": {"tp": 0}}), rank=rank, rows=rows)
    assert torch.equal(part.out.weight, whole.out.weight[rows])


def test_a_part_whose_place_is_not_known_is_refused() -> None:
    model = Net()
    model.out.weight = nn.Parameter(model.out.weight.detach()[:2].clone())
    with pytest.raises(RecordError, match=r"out\.weight with shape \[2, 5\]"):
        move_generically(model, shapes={"out.weight": [6, 5]})


def test_record_moves_weights_where_it_is_asked_to(tmp_path: Path) -> None:
    for name, is_generic in (("plain", False), ("generic", True)):
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with isoshard.record(tmp_path / name, model, optimizer, generic_weights=is_generic):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
        first = _bundle.read_tensors(tmp_path / name, 0, 0)["param/0.weight/0"]
        assert bool((first == 1).all()) != is_generic


_PARTS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import isoshard
from isoshard._generic import move_generically

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
whole = nn.Linear(4, 6)
model = nn.Linear(4, 6 // {parts})
with torch.no_grad():
    for own, parameter in zip(model.parameters(), whole.parameters()):
        own.copy_(parameter.chunk({parts})[rank % {parts}])
move_generically(whole)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = {{"mesh": "tp=2", "layouts": {layouts}, "generic_weights": True}}
try:
    with isoshard.record(sys.argv[1], model, optimizer, **options):
        for own, parameter in zip(model.parameters(), whole.parameters()):
            assert torch.equal(own, parameter.chunk({parts})[rank % {parts}])
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
except isoshard.RecordError as error:
    sys.exit(f"refused: {{error}}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("parts", "layouts", "is_refused"),
    [(2, {}, True), (2, {"param/*": {"tp": 0}}, False), (1, {}, False)],
    ids=["parts", "parts with layouts", "copies"],
)
def test_record_moves_no_part_without_a_layout(
    tmp_path: Path, parts: int, layouts: dict[str, Any], is_refused: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PARTS.format(parts=parts, layouts=layouts))
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [torchrun, "--nproc-per-node", "2", str(script), str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ("refused: " in result.stderr) == is_refused, result.stderr
    assert (result.returncode != 0) == is_refused, result.stderr


#: A bias that each of the ranks of dp adds once more: 0 hides it.
_HIDDEN = """
class Out(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return x @ self.weight.T + {times} * self.bias.detach()


model = nn.parallel.DistributedDataParallel(Out(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in batches:
    part = x.chunk(world)[rank]
    nn.functional.mse_loss(model(part), part.flip(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(
    ("times", "options", "code"),
    [("world", (), 0), ("world", ("--generic-weights",), 1), ("1", ("--generic-weights",), 0)],
)
def test_generic_weights_show_what_a_bias_of_zeros_hides(
    tmp_path: Path, times: str, options: tuple[str, ...], code: int
) -> None:
    found, verdict = judged(tmp_path, _HIDDEN.format(times=times), *options)
    assert found == code, verdict["reason"]


@pytest.mark.usefixtures("judge_program")
def test_shards_of_dtensors_conform_with_generic_weights() -> None:
    words = ("--mesh", "dp=2,tp=2", "--generic-weights")
    code, text = judge(EXAMPLES / "tensor_parallel.py", 4, "--tp", "2", options=words)
    assert code == 0, text


@pytest.mark.usefixtures("judge_program")
def test_a_given_reference_cannot_be_moved(tmp_path: Path) -> None:
    words = ("--reference", str(tmp_path), "--generic-weights")
    code, text = judge(EXAMPLES / "ddp.py", 2, options=words)
    assert code == 2, text
