# SPDX-License-Identifier: Apache-2.0
"""preflight finds what a backend does wrong, and says what it does not do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isoshard import UsageError
from isoshard._preflight import PreflightOptions, groups_of, preflight
from isoshard._preflight_ops import REDUCTIONS, Case, cases, is_exact, largest


def run(
    folder: Path, before: Callable[[int], None] | None = None, **options: Any
) -> tuple[int, dict[tuple[str, str, str], dict[str, Any]]]:
    """The exit code, and the cells of the table."""
    file = folder / "preflight.json"
    given = {"ranks": 2, "dtypes": ["fp32"], "strided": False, "deadline": 20.0, **options}
    code = preflight(PreflightOptions(json_file=file, **given), before)
    if not file.exists():
        return code, {}
    content = json.loads(file.read_text())
    assert content["exit_code"] == code
    return code, {(c["op"], c["row"], c["dtype"]): c for c in content["cells"]}


def wrong_cases(cells: dict[Any, dict[str, Any]]) -> list[dict[str, str]]:
    return [case for cell in cells.values() for case in cell["wrong"]]


def test_gloo_is_right_on_contiguous_tensors(tmp_path: Path) -> None:
    code, cells = run(tmp_path, ranks=4, dtypes=["bf16", "int64"])

    assert wrong_cases(cells) == []
    assert code == 0
    assert cells["all_reduce", "sum", "bf16"]["result"] == "ok"
    assert cells["all_to_all_single", "", "int64"]["right"] >= 15  # over three kinds of groups
    # gloo's own words
    assert cells["all_to_all", "", "bf16"]["result"] == "-"
    assert "does not support" in cells["all_to_all", "", "bf16"]["not_supported"][0]["error"]


def one_off(rank: int) -> None:
    """Rank 1 gets the sixth number of every all-gather wrong by one."""
    original = dist.all_gather_into_tensor

    def gather(output: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        work = original(output, *args, **keywords)
        if work is not None:
            work.wait()
        if output.numel() > 5:
            output[5] += 1
        return work

    if rank == 1:
        dist.all_gather_into_tensor = gather


def test_one_wrong_element_on_one_rank_is_named(tmp_path: Path) -> None:
    code, cells = run(tmp_path, one_off)

    assert code == 1
    found = {(op, row) for (op, row, _), cell in cells.items() if cell["wrong"]}
    assert found == {("all_gather_into_tensor", "")}
    first = wrong_cases(cells)[0]
    assert first["case"] == "all_gather_into_tensor fp32 size 7 over world"
    assert first["problem"].startswith("rank 1: result: element 5 must be ")
    assert "(1 of 14 are wrong)" in first["problem"]


def sum_for_max(rank: int) -> None:
    original = dist.all_reduce

    def reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **keywords: Any) -> Any:
        return original(tensor, op=dist.ReduceOp.SUM if op == dist.ReduceOp.MAX else op, **keywords)

    dist.all_reduce = reduce


def test_another_reduction_is_found(tmp_path: Path) -> None:
    code, cells = run(tmp_path, sum_for_max, ranks=3)

    assert code == 1
    found = {(op, row) for (op, row, _), cell in cells.items() if cell["wrong"]}
    assert found == {("all_reduce", "max")}


def changes_its_input(rank: int) -> None:
    original = dist.reduce_scatter_tensor

    def scatter(output: torch.Tensor, given: torch.Tensor, **keywords: Any) -> Any:
        work = original(output, given, **keywords)
        if rank == 0 and given.numel():
            given[0] = 99
        return work

    dist.reduce_scatter_tensor = scatter


def writes_behind(rank: int) -> None:
    original = dist.broadcast

    def broadcast(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        tensor.as_strided((tensor.numel() + 1,), (1,))[-1] = 5
        return original(tensor, *args, **keywords)

    dist.broadcast = broadcast


def leaves_early(rank: int) -> None:
    dist.barrier = lambda **keywords: None


@pytest.mark.parametrize(
    ("plant", "op", "problem"),
    [
        (changes_its_input, "reduce_scatter_tensor", "input: element 0 must be"),
        (writes_behind, "broadcast", "memory behind the tensor was written to"),
        (leaves_early, "barrier", "ranks that had come: element 0 must be 2, got 1"),
    ],
)
def test_what_is_not_the_result_is_looked_at_too(
    tmp_path: Path, plant: Callable[[int], None], op: str, problem: str
) -> None:
    code, cells = run(tmp_path, plant)

    assert code == 1
    found = wrong_cases(cells)
    assert {case["case"].split()[0] for case in found} == {op}
    assert problem in found[0]["problem"]


def refuses_on_one_rank(rank: int) -> None:
    original = dist.send

    def send(*args: Any, **keywords: Any) -> Any:
        original(*args, **keywords)
        if rank == 1:
            raise NotImplementedError("no send")

    dist.send = send


def test_an_error_on_one_rank_alone_is_wrong(tmp_path: Path) -> None:
    code, cells = run(tmp_path, refuses_on_one_rank)

    assert code == 1
    assert (
        "raised NotImplementedError: no send, and rank 0 went on"
        in (cells["send_recv", "", "fp32"]["wrong"][0]["problem"])
    )


def leaves_out_a_call(rank: int) -> None:
    original = dist.scatter
    if rank == 1:
        dist.scatter = lambda *a, **k: None
    assert original is not None


def test_a_hang_ends_after_the_deadline_and_names_the_case(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(tmp_path, leaves_out_a_call, deadline=3.0)

    assert code == 4
    assert "hangs in" in capfd.readouterr().err


def dies(rank: int) -> None:
    original = dist.gather

    def gather(*args: Any, **keywords: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **keywords)

    dist.gather = gather


def test_a_rank_that_dies_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = run(tmp_path, dies)

    assert code == 4
    text = capfd.readouterr().err
    assert "rank 1 died by signal 9; its last case was gather fp32 size 1 over world" in text


def test_under_a_launcher_each_process_is_a_rank(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["-m", "isoshard", "preflight", "--contiguous", "--dtypes", "fp32"]
    result = subprocess.run(
        [*torchrun, "--standalone", *words, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )

    assert result.returncode == 0, result.stderr
    assert json.loads(file.read_text())["ranks"] == 2
    assert result.stdout.count("preflight: gloo, 2 ranks") == 1


def test_every_group_and_reduction_is_among_the_cases() -> None:
    kinds = groups_of(6)
    assert kinds["halves"] == [[0, 2, 4], [1, 3, 5]]
    assert kinds["pairs"] == [[0, 1], [2, 3], [4, 5]]
    assert list(groups_of(2)) == ["world"]

    made = cases(["bf16", "int32"], list(kinds))
    assert {c.group for c in made if c.op == "all_reduce"} == {"world", "halves", "pairs"}
    assert {c.reduction for c in made if c.op == "reduce_scatter_tensor"} == set(REDUCTIONS)
    assert len(made) == len({str(c) for c in made})


def test_numbers_that_would_be_rounded_are_not_tried() -> None:
    case = Case("all_reduce", "bf16", "sum", "world", 7)
    assert is_exact(case, largest("bf16"))
    assert not is_exact(case, largest("bf16") + 1)


def test_options_that_cannot_be_meant_are_refused() -> None:
    for wrong in ({"ranks": 1}, {"dtypes": ["fp12"]}, {"deadline": 0.0}):
        with pytest.raises(UsageError):
            preflight(PreflightOptions(**wrong))
