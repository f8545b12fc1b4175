# SPDX-License-Identifier: Apache-2.0
"""`isoshard repro` writes a script that shows the first wrong tensor without this package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_judge import judge

from isoshard._mesh import Mesh
from isoshard._repro_places import places_of
from isoshard.cli import main

pytestmark = pytest.mark.usefixtures("judge_program")
MOST_LINES = 60
#: A folder of this name in front of all others on the path raises when it is imported.
_TRAP = "raise ImportError('a written script must not import isoshard')\n"

DDP = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for step in range(5):
    x = torch.randn(6, 8, generator=generator).chunk(world)[rank]
    model(x).square().mean().backward()
    CHANGE
    optimizer.step()
    optimizer.zero_grad()
"""
FSDP2 = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 6))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)


class Clamped(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        CHANGE


optimizer = Clamped(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
for step in range(5):
    x = torch.randn(6, 8, generator=generator).chunk(world)[rank]
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DOUBLED = "if rank == 1: model.module[2].weight.grad.mul_(2)"
LATE = "if step == 1 and rank == 1: model.module[2].weight.grad.mul_(2)"
SHRUNK = "if rank == 1: model[2].weight.to_local().mul_(0.9)"


def judged(folder: Path, script: str, change: str, *options: str, ranks: int = 2) -> Path:
    """The --output-dir of a judge of a script with this line in place of CHANGE."""
    file = folder / "train.py"
    file.write_text(script.replace("CHANGE", change))
    output = folder / "runs"
    judge(file, ranks, options=("--quiet", "--output-dir", str(output), *options))
    assert (output / "report" / "report.json").exists()
    return output


def run_alone(file: Path) -> tuple[int, str]:
    """Exit code and output of a script that can import everything but isoshard."""
    trap = file.parent / "trap"
    trap.mkdir(exist_ok=True)
    (trap / "isoshard.py").write_text(_TRAP)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ISOSHARD_")}
    environment["PYTHONPATH"] = str(trap)
    command = [sys.executable, "-s", str(file)]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    return result.returncode, result.stdout + result.stderr


def factors(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"factor (\S+);", text)]


def test_the_trap_is_imported_before_this_package(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import isoshard\n")
    code, text = run_alone(script)
    assert code != 0
    assert "must not import" in text


def test_a_scaled_gradient_is_shown_until_it_is_right(tmp_path: Path) -> None:
    folder = judged(tmp_path, DDP, DOUBLED)
    assert main(["repro", str(folder)]) == 0

    script = folder / "repro.py"
    assert len(script.read_text().splitlines()) <= MOST_LINES
    code, text = run_alone(script)
    assert code == 1, text
    assert factors(text) == pytest.approx([1, 2], rel=1e-5)

    (tmp_path / "train.py").write_text(DDP.replace("CHANGE", "pass"))
    code, text = run_alone(script)
    assert code == 0, text
    assert factors(text) == pytest.approx([1, 1], rel=1e-5)

    (tmp_path / "train.py").write_text("raise RuntimeError('neither right nor wrong')\n")
    assert run_alone(script)[0] == 2


def test_a_gradient_of_a_later_step_is_shown(tmp_path: Path) -> None:
    folder = judged(tmp_path, DDP, LATE)
    output = tmp_path / "elsewhere.py"
    assert main(["repro", str(folder), "--output", str(output)]) == 0
    code, text = run_alone(output)
    assert code == 1, text
    assert factors(text) == pytest.approx([1, 2], rel=1e-5)


def test_a_gradient_before_it_is_clipped_is_shown(tmp_path: Path) -> None:
    change = f"{DOUBLED}\n    nn.utils.clip_grad_norm_(model.parameters(), 0.01)"
    folder = judged(tmp_path, DDP, change)
    assert main(["repro", str(folder)]) == 0
    code, text = run_alone(folder / "repro.py")
    assert code == 1, text
    assert factors(text) == pytest.approx([1, 2], rel=1e-5)


def test_a_wrong_update_of_an_uneven_shard_is_shown(tmp_path: Path) -> None:
    folder = judged(tmp_path, FSDP2, SHRUNK)
    assert main(["repro", str(folder)]) == 0
    script = folder / "repro.py"
    assert len(script.read_text().splitlines()) <= MOST_LINES
    code, text = run_alone(script)
    assert code == 1, text
    (factor,) = factors(text)
    assert 0.9 < factor < 1

    (tmp_path / "train.py").write_text(FSDP2.replace("CHANGE", "pass"))
    assert run_alone(script)[0] == 0


def test_a_wrong_forward_tensor_is_shown(tmp_path: Path) -> None:
    wrong = DDP.replace("for step in", "model.module[1].register_forward_hook("
                        "lambda m, a, out: out * (1 + rank))\nfor step in")  # fmt: skip
    folder = judged(tmp_path, wrong, "pass")
    assert main(["repro", str(folder)]) == 0
    script = folder / "repro.py"
    assert len(script.read_text().splitlines()) <= MOST_LINES
    code, text = run_alone(script)
    assert code == 1, text
    (factor,) = factors(text)
    assert 1 < factor < 2

    (tmp_path / "train.py").write_text(DDP.replace("CHANGE", "pass"))
    assert run_alone(script)[0] == 0


def test_samples_that_are_not_shared_out_are_no_tensor(tmp_path: Path) -> None:
    folder = judged(tmp_path, DDP.replace(".chunk(world)[rank]", ""), "pass")
    assert main(["repro", str(folder)]) == 1
    assert not (folder / "repro.py").exists()


def test_two_ranks_are_enough_where_they_have_the_same_wrong_tensor(tmp_path: Path) -> None:
    folder = judged(tmp_path, DDP, DOUBLED.replace("rank == 1", "rank > 0"), ranks=3)
    assert main(["repro", str(folder)]) == 0
    code, text = run_alone(folder / "repro.py")
    assert code == 1, text
    assert factors(text) == pytest.approx([1, 2], rel=1e-5)


def test_three_ranks_stay_where_two_are_right(tmp_path: Path) -> None:
    folder = judged(tmp_path, DDP, DOUBLED.replace("rank == 1", "rank == 2"), ranks=3)
    assert main(["repro", str(folder)]) == 0
    code, text = run_alone(folder / "repro.py")
    assert code == 1, text
    assert factors(text) == pytest.approx([1, 1, 2], rel=1e-5)


def test_a_run_that_conforms_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = judged(tmp_path, DDP, "pass")
    assert main(["repro", str(folder)]) == 2
    assert "conforms" in capsys.readouterr().err
    assert not (folder / "repro.py").exists()


def test_a_folder_that_is_none_of_judge_is_a_bad_file(tmp_path: Path) -> None:
    assert main(["repro", str(tmp_path)]) == 3
    assert main(["repro", str(tmp_path / "missing")]) == 3


def test_a_file_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    folder = judged(tmp_path, DDP, DOUBLED)
    assert main(["repro", str(folder), "--output", str(tmp_path / "train.py")]) == 2
    assert "init_process_group" in (tmp_path / "train.py").read_text()


def test_what_the_script_no_longer_shows_is_not_handed_out(tmp_path: Path) -> None:
    folder = judged(tmp_path, DDP, DOUBLED)
    (tmp_path / "train.py").write_text(DDP.replace("CHANGE", DOUBLED.replace("2)", "3)")))
    assert main(["repro", str(folder)]) == 1
    assert not (folder / "repro.py").exists()


@pytest.mark.parametrize(
    ("placements", "copies", "parts"),
    [
        ([], [[0], [1], [2], [3]], [5, 5, 5, 5]),
        ([{"axis": "tp", "kind": "shard", "dim": 0}], [[0, 1], [2, 3]], [0, 5, 0, 5]),
        ([{"axis": "dp", "kind": "partial", "reduction": "avg"}], [[0, 2], [1, 3]], [2, 3, 8, 7]),
    ],
)
def test_the_ranks_of_a_copy_make_up_the_whole(
    placements: list[dict[str, object]], copies: list[list[int]], parts: list[float]
) -> None:
    is_cut = any(p["kind"] == "shard" for p in placements)
    record = {"global_shape": [2 if is_cut else 1], "placements": placements}
    places = places_of(dict.fromkeys(range(4), record), Mesh({"dp": 2, "tp": 2}))
    assert places.copies == copies
    values = {rank: torch.tensor([float(part)]) for rank, part in enumerate(parts)}
    whole = torch.tensor([0.0, 5.0] if is_cut else [5.0], dtype=torch.float64)
    assert all(torch.equal(places.assemble(values, copy), whole) for copy in copies)
