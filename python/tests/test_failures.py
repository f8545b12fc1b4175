# SPDX-License-Identifier: Apache-2.0
"""A run that fails is explained by the rank that failed first, or by where ranks stood."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 4).chunk(world)[rank]
for _ in range(3):
    model(x).square().mean().backward()
    if world > 1 and rank == 1:
        FAULT
    optimizer.step()
"""


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        (
            'raise ValueError("no more data")',
            [],
            ["rank 1, the first to fail, were:", "ValueError: no more data"],
        ),
        (
            "dist.barrier()",
            ["--timeout", "8"],
            ["within 8 seconds", "rank 1 was at train.py:13 (<module>), in barrier", "rank 0 was"],
        ),
        (
            "import os; os.kill(os.getpid(), 9)",
            [],
            ["exit codes [", "rank 1, the first to fail, were:"],
        ),
    ],
)
def test_a_failure_says_which_rank_and_where(
    tmp_path: Path, fault: str, options: list[str], words: list[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("FAULT", fault))
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [sys.executable, "-m", "isoshard", "judge", *options, "--", torchrun]

    result = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert result.returncode == 4, result.stdout + result.stderr
    for word in words:
        assert word in result.stderr
