# SPDX-License-Identifier: Apache-2.0
"""judge --replay: loops in which each process draws its own samples are judged as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: nanoGPT's loop: one generator per process, accumulation divided by the number of ranks.
NANO = """\
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

variant = sys.argv[1]
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
data = torch.randint(0, 32, (4000,), generator=torch.Generator().manual_seed(0))
micro_batches = 4 if variant == "as_many_on_each_rank" else 4 // world
if variant == "micro_batch_lost" and rank == 1:
    micro_batches -= 1
torch.manual_seed(7)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, idx, targets=None):
        h = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.head(h + self.down(F.gelu(self.up(h))))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


seed = 0 if variant == "equal_samples" else rank
draws = torch.Generator().manual_seed(seed)


def get_batch():
    at = torch.randint(len(data) - 8, (3,), generator=draws)
    x = torch.stack([data[i : i + 8] for i in at])
    y = torch.stack([data[i + 1 : i + 9] for i in at])
    if variant == "other_labels_on_rank_1" and rank == 1:
        y = y.roll(1, 0)
    return x, y


model = raw = Gpt()
if world > 1:
    model = DistributedDataParallel(raw)
optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
x, y = get_batch()
for _ in range(3):
    for micro in range(micro_batches):
        if world > 1:
            is_last = micro == micro_batches - 1
            model.require_backward_grad_sync = is_last != (variant == "syncs_all_but_the_last")
        if variant == "loss_in_the_model":
            loss = model(x, y)
        elif variant == "loss_by_hand":
            chosen = model(x).log_softmax(-1).gather(-1, y.unsqueeze(-1))
            loss = -chosen.sum() / y.numel()
        else:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        if variant == "divided_by_world":
            loss = loss / world
        (loss / micro_batches).backward()
        x, y = get_batch()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


def judge(
    folder: Path, variant: str, *options: str, precision: str = "native"
) -> tuple[int, dict[str, Any], str]:
    """Exit code, the case of report.json (empty without one), and what was printed."""
    script, report = folder / "nano.py", folder / "report.json"
    script.write_text(NANO)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [sys.executable, "-m", "isoshard", "judge", "--report", str(report), *options]
    command += ["--precision", precision, "--", torchrun, "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, str(script), variant], capture_output=True, text=True, timeout=280, check=False
    )
    case = json.loads(report.read_text())["cases"][0] if report.exists() else {}
    return result.returncode, case, result.stdout + result.stderr


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(
    ("variant", "precision"),
    [
        ("loss_in_the_model", "both"),
        ("loss_outside_of_the_model", "both"),
        ("loss_by_hand", "native"),
        ("as_many_on_each_rank", "native"),
    ],
)
def test_right_loops_conform_unchanged(tmp_path: Path, variant: str, precision: str) -> None:
    code, case, said = judge(tmp_path, variant, "--replay", precision=precision)

    assert (code, case["status"]) == (0, "conforms"), said


#: variant, and the first finding: id or cause id, kind of record
MISTAKES = [
    ("syncs_all_but_the_last", "rank_local", "grad"),
    ("divided_by_world", "scale_of_formula", "scalar"),
    ("equal_samples", "samples_twice", "data_id"),
]


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(("variant", "found", "kind"), MISTAKES)
def test_mistakes_are_named(tmp_path: Path, variant: str, found: str, kind: str) -> None:
    code, case, said = judge(tmp_path, variant, "--replay")

    assert code == 1, said
    first = case["findings"][0]
    assert first["kind"] == kind
    assert found in (first["finding"]["id"], first["cause"]["id"])


@pytest.mark.usefixtures("judge_program")
def test_wrong_labels_of_a_rank_are_replayed_too(tmp_path: Path) -> None:
    """The rank computes rightly with them, and --replay judges nothing else; a note says so."""
    code, case, said = judge(tmp_path, "other_labels_on_rank_1", "--replay")

    assert (code, case["status"]) == (0, "conforms"), said
    assert any("--replay" in note for note in case["notes"]), case["notes"]


@pytest.mark.usefixtures("judge_program")
def test_ranks_must_make_the_forward_passes_of_the_single_process(tmp_path: Path) -> None:
    code, _, said = judge(tmp_path, "micro_batch_lost", "--replay")

    assert code == 1
    assert "2 on rank 0, 1 on rank 1 and 4 in the single process" in said


@pytest.mark.usefixtures("judge_program")
def test_without_replay_the_hint_names_it(tmp_path: Path) -> None:
    code, case, said = judge(tmp_path, "loss_in_the_model")

    assert code == 1
    assert case["findings"][0]["cause"]["id"] == "samples_foreign"
    assert any("--replay" in note for note in case["notes"]), case["notes"]


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--reference", "bundle"), "--reference bundle"),
        (("--keep", "what_differs"), "--keep what_differs"),
        (("--mesh", "cp=2"), "cp"),
    ],
)
def test_options_that_do_not_go_with_replay_are_rejected(
    tmp_path: Path, options: tuple[str, ...], word: str
) -> None:
    code, _, said = judge(tmp_path, "loss_in_the_model", "--replay", *options)

    assert code == 2
    assert word in said
