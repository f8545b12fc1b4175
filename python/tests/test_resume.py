# SPDX-License-Identifier: Apache-2.0
"""--resume-at: a resumed training must be the uninterrupted one; what was not restored is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from isoshard import _bundle, _perturb, _rank_by_rank
from isoshard._bundle import Entry
from isoshard._course import Course
from isoshard._resume_causes import Sides, unrestored
from isoshard.cli import main

SCRIPT = Path(__file__).with_name("resumable.py")
AT = 3


@dataclass
class Verdict:
    code: int
    text: str
    folder: Path

    @property
    def case(self) -> dict[str, Any]:
        (case,) = json.loads((self.folder / "report" / "report.json").read_text())["cases"]
        return dict(case)

    @property
    def first(self) -> tuple[str, str, int]:
        """Stage, name and step of what is wrong first."""
        finding = self.case["findings"][0]
        return finding["stage"], finding["name"], finding["step"]

    @property
    def unrestored(self) -> list[tuple[str, int | None]]:
        sides = Sides.of(self.folder / "uninterrupted", self.folder / "resumed", AT)
        return [(one.what, one.step) for one in unrestored(sides)]


def judge(
    folder: Path, *words: str, ranks: int = 2, options: tuple[str, ...] = (), at: int = AT
) -> Verdict:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = [sys.executable, "-m", "isoshard", "judge", "--resume-at", str(at), *options]
    command += ["--output-dir", str(folder), "--", torchrun, "--nproc-per-node", str(ranks)]
    command += [str(SCRIPT), "--checkpoint", "{run}", *words]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=280,
        check=False,
    )
    return Verdict(result.returncode, result.stdout + result.stderr, folder)


live = pytest.mark.usefixtures("judge_program")


@live
@pytest.mark.parametrize(
    "words",
    [
        ("--dropout", "0.3"),
        ("--optimizer", "sgd"),
        ("--wrap", "fsdp2"),
    ],
)
def test_a_right_resume_has_the_bits_of_the_uninterrupted_run(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    verdict = judge(tmp_path, *words)
    assert verdict.code == 0, verdict.text
    assert verdict.case["strength"] == "exact"
    assert verdict.unrestored == []


@live
def test_a_right_resume_that_rounds_in_another_order_conforms_within_tolerance(
    tmp_path: Path,
) -> None:
    """DDP cuts its buckets anew after its first step, so three ranks add in another order."""
    verdict = judge(tmp_path, "--bucket", "0.001", ranks=3)
    assert verdict.code == 0, verdict.text
    assert verdict.case["strength"] == "within tolerance"


@live
@pytest.mark.parametrize(
    ("words", "first", "found"),
    [
        (("order",), ("data ids", "input_ids", 0), ("data", None)),
        (("skipped",), ("data ids", "input_ids", 0), ("data", 0)),
        (("step",), ("data ids", "input_ids", 0), ("data", 4)),
        (("prefix",), ("weights as read", "up.weight", 0), ("weights", 0)),
        (("schedule",), ("step settings", "learning_rate", 1), ("learning_rate", 1)),
        (("fresh",), ("step settings", "learning_rate", 0), ("everything", 0)),
        (("fresh", "--decay", "1"), ("data ids", "input_ids", 0), ("everything", 0)),
        (("random", "--dropout", "0.3"), ("forward", "down", 0), ("random_state", None)),
        (
            ("optimizer", "--decay", "1"),
            ("optimizer state", "up.weight.exp_avg", 0),
            ("optimizer", None),
        ),
        (
            ("optimizer", "--decay", "1", "--optimizer", "sgd"),
            ("optimizer state", "up.weight.momentum_buffer", 0),
            ("optimizer", None),
        ),
        (
            ("optimizer", "--decay", "1", "--wrap", "fsdp2"),
            ("optimizer state", "up.weight.exp_avg", 0),
            ("optimizer", None),
        ),
        (("model", "--wrap", "fsdp2"), ("weights as read", "up.weight", 0), ("weights", 0)),
    ],
)
def test_what_was_not_restored_is_named_at_the_first_tensor_that_shows_it(
    tmp_path: Path, words: tuple[str, ...], first: tuple[str, str, int], found: tuple[str, Any]
) -> None:
    verdict = judge(tmp_path, "--mistake", *words)
    assert verdict.code == 1, verdict.text
    assert verdict.first == first
    assert verdict.unrestored[0] == found


@live
def test_an_older_checkpoint_is_told_from_a_start_without_one(tmp_path: Path) -> None:
    verdict = judge(tmp_path, "--every", "2")
    assert verdict.code == 1, verdict.text
    assert verdict.unrestored == [("everything", 2)]


@live
def test_the_second_start_may_have_a_command_of_its_own(tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    again = f"{torchrun} --nproc-per-node 2 {SCRIPT} --checkpoint {{run}} --steps"
    verdict = judge(tmp_path / "right", options=("--resume-command", f"{again} 9"))
    assert verdict.code == 0, verdict.text
    verdict = judge(tmp_path / "short", options=("--resume-command", f"{again} 4"))
    assert verdict.code == 1, verdict.text
    assert verdict.unrestored == [("end", 4)]
    verdict = judge(tmp_path / "none", options=("--resume-command", f"{again} 3"))
    assert verdict.code == 4, verdict.text
    assert not (tmp_path / "none" / "report" / "report.json").exists()


@live
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--steps", "3"), 4),  # it ends before the step
        (("--every", "7"), 2),  # it saves nothing before the stop
        (("--mistake", "no seed"), 4),  # the stopped run is no beginning of the uninterrupted one
    ],
)
def test_a_script_that_cannot_be_judged_is_refused(
    tmp_path: Path, words: tuple[str, ...], code: int
) -> None:
    verdict = judge(tmp_path, *words)
    assert verdict.code == code, verdict.text
    assert not (tmp_path / "report" / "report.json").exists()


@pytest.mark.quick
@pytest.mark.parametrize(
    "options",
    [
        ["--resume-at", "0"],
        ["--resume-command", "python train.py"],
        ["--resume-at", "3", "--precision", "float64"],
        ["--resume-at", "3", "--reference-command", "python train.py"],
        ["--resume-at", "3", "--from-step", "2"],
        ["--resume-at", "3", "--keep", "what_differs"],
        ["--resume-at", "3", "--generic-weights"],
        ["--resume-at", "3", "--run-to-end"],
        ["--resume-at", "3", "--grad-scale", "1"],
        ["--resume-at", "3", "--resume-command", "torchrun --nproc-per-node 2 train.py"],
    ],
)
def test_options_that_do_not_fit_are_wrong_usage(options: list[str]) -> None:
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), "--checkpoint", "{run}"]
    assert main(["judge", *options, "--", *command]) == 2


@pytest.mark.quick
def test_a_command_without_a_folder_of_its_own_is_wrong_usage(tmp_path: Path) -> None:
    command = ["torchrun", "--nproc-per-node", "2", str(SCRIPT), "--checkpoint", str(tmp_path)]
    assert main(["judge", "--resume-at", "3", "--", *command]) == 2


# -- ranks side by side ------------------------------------------------------------------------


def recorded(folder: Path, ranks: list[dict[str, torch.Tensor]]) -> Path:
    """A bundle of one step; a plain tensor of unknown place on each rank."""
    run = folder.name
    _bundle.prepare_folder(folder, run)
    for rank, tensors in enumerate(ranks):
        entries = []
        for name, tensor in tensors.items():
            kind, _, short = name.partition("/")
            record = {"kind": kind, "name": short, "call": 0, "dtype": "fp32"}
            entries.append(Entry({**record, "local_shape": list(tensor.shape)}, tensor))
        _bundle.write_rank(folder, run, rank, 0, entries)
    settings = {"training": {"optimizer": {"kind": "sgd"}}, "judging": {}}
    mesh = [{"axis": "dp", "degree": len(ranks)}]
    manifest = {"schema": _bundle.SCHEMA, "run": run, "mesh": mesh, "steps": [0]}
    _bundle.seal(folder, {**manifest, "settings": settings})
    return folder


def places(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    records = _bundle.read_records(folder, 0, rank)["records"]
    return {r["name"]: {k: r.get(k) for k in ("global_shape", "boxes", "flat")} for r in records}


def test_what_ranks_hold_alike_is_one_tensor_and_others_lie_behind_each_other(
    tmp_path: Path,
) -> None:
    alike, rows = torch.ones(3), [torch.zeros(2, 4), torch.ones(1, 4)]
    odd = [torch.zeros(2, 3), torch.ones(2, 2)]
    ranks = [{"param/same": alike, "param/rows": rows[i], "param/odd": odd[i]} for i in range(2)]
    ranks[1]["param/own"] = torch.ones(2, 2)
    reference = recorded(tmp_path / "a", ranks)
    _rank_by_rank.write_whole(reference, reference, tmp_path / "whole")
    _rank_by_rank.write_ranks(reference, reference, tmp_path / "ranks")
    whole = _bundle.read_tensors(tmp_path / "whole", 0, 0)
    assert torch.equal(whole["param/same/0"], alike)
    assert torch.equal(whole["param/rows/0"], torch.cat(rows))
    assert torch.equal(whole["param/odd/0"], torch.cat([t.flatten() for t in odd]))
    assert torch.equal(whole["param/own/0"], torch.ones(2, 2))
    of_second = places(tmp_path / "ranks", 1)
    box = {"local_offset": [0, 0], "global_offset": [2, 0], "size": [1, 4]}
    run = {"local_begin": 0, "global_begin": 6, "count": 4}
    assert of_second["same"] == {"global_shape": [3], "boxes": None, "flat": None}
    assert of_second["rows"] == {"global_shape": [3, 4], "boxes": [box], "flat": None}
    assert of_second["odd"] == {"global_shape": [10], "boxes": None, "flat": [run]}


def test_the_first_difference_is_that_of_any_rank(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan")])
    ranks = [{"param/a": nan, "param/b": torch.ones(2)} for _ in range(2)]
    reference = recorded(tmp_path / "a", ranks)
    assert _rank_by_rank.first_difference(reference, recorded(tmp_path / "b", ranks)) is None
    ranks[1]["param/b"] = torch.tensor([1.0, 1.0 + 2.0**-23])
    other = recorded(tmp_path / "c", ranks)
    assert _rank_by_rank.first_difference(reference, other) == (0, ("param", "b", 0))


# -- what a rank counts ------------------------------------------------------------------------


def test_a_step_without_a_forward_pass_does_not_count() -> None:
    """torch.distributed.checkpoint makes one to have states before it loads them."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    course = Course(2, None)
    optimizer.register_step_post_hook(course.count)
    optimizer.step()
    x = torch.ones(1, 2)
    come = []
    for _ in range(3):
        for _ in range(2):  # micro-batches
            come.append(course.has_come(model, [optimizer], ((x,), {})))
        optimizer.step()
        optimizer.step()
    assert come == [False, False, False, False, True, True]
    assert [len(inputs) for inputs in course.steps.inputs] == [2, 2, 2]
    assert course.steps.rates == [0.1, 0.1, 0.1]


def test_ranks_move_a_parameter_alike_whatever_else_they_hold() -> None:
    models = [torch.nn.ModuleDict({"a": torch.nn.Linear(n, 2), "b": torch.nn.Linear(3, 3)})
              for n in (2, 5)]  # fmt: skip
    models[1]["b"].load_state_dict(models[0]["b"].state_dict())
    before = models[0]["b"].weight.detach().clone()
    for model in models:
        _perturb.perturb(model, 7, on_ranks=True)
    assert torch.equal(models[0]["b"].weight, models[1]["b"].weight)
    assert not torch.equal(models[0]["b"].weight, before)
