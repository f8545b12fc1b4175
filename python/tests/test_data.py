# SPDX-License-Identifier: Apache-2.0
"""What makes a run differ from one process though its parallelism is right is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from report_files import verdicts_of
from torch import nn

from isoshard import Report, _bundle
from isoshard._bundle import Entry
from isoshard._data import check_samples
from isoshard._safetensors import dtype_name

pytestmark = pytest.mark.usefixtures("judge_program")
IDS = torch.randint(0, 50, (8, 7), generator=torch.Generator().manual_seed(1))
LABELS = IDS.masked_fill(torch.arange(7) >= torch.arange(8)[:, None], -100)


class Labelled(nn.Module):
    """The mean loss over the labels that count."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(50, 16), norm, nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(input_ids).mT).mT
        return nn.functional.cross_entropy(self.head(hidden).mT, labels)


def ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def doubled(model: nn.Module, mesh: Any) -> nn.Module:
    model.head.register_forward_hook(lambda *call: 2 * call[2], prepend=True)
    return ddp(model, mesh)


def judged(
    check: Callable[..., Report], parallelize: Any, norm: type[nn.Module], labels: torch.Tensor
) -> Report:
    return check(
        lambda: Labelled(norm(16) if norm is not nn.Identity else norm()),
        parallelize,
        mesh={"dp": 2},
        batch={"input_ids": IDS, "labels": labels},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        raises=False,
    )


def test_a_mean_over_each_rank_s_labels_is_named(isoshard_check: Callable[..., Report]) -> None:
    report = judged(isoshard_check, ddp, nn.Identity, LABELS)

    assert report.exit_code == 1
    assert "likely cause: the data-parallel ranks count 6 to 22 labels" in report.text


def test_batch_norm_is_named(isoshard_check: Callable[..., Report]) -> None:
    report = judged(isoshard_check, ddp, nn.BatchNorm1d, IDS)

    assert report.exit_code == 1
    assert "likely cause: norm normalizes by the samples of a batch" in report.text


@pytest.mark.parametrize("labels", [IDS, LABELS])
def test_other_causes_are_not_theirs(
    isoshard_check: Callable[..., Report], labels: torch.Tensor
) -> None:
    report = judged(isoshard_check, doubled, nn.Identity, labels)

    assert report.exit_code == 1
    assert "data-parallel rank" not in report.text
    assert "head" in report.verdict


class Classifier(nn.Module):
    """One label for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(input_ids).mean(1)), labels)


def test_a_label_for_each_sample_is_counted_too(isoshard_check: Callable[..., Report]) -> None:
    report = isoshard_check(
        Classifier,
        ddp,
        mesh={"dp": 2},
        batch={"input_ids": IDS, "labels": LABELS[:, 1]},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        raises=False,
    )

    assert report.exit_code == 1
    assert "the data-parallel ranks count 2 to 4 labels" in report.text


def test_right_runs_have_no_cause(isoshard_check: Callable[..., Report]) -> None:
    report = judged(isoshard_check, ddp, nn.Identity, IDS)

    assert report.conforms, report.text
    assert "data-parallel rank" not in report.text


def unshared(model: nn.Module, mesh: Any) -> nn.Module:
    """Every rank gets the whole batch in place of its share."""
    model.register_forward_pre_hook(
        lambda *call: ((), {"input_ids": IDS, "labels": IDS}), with_kwargs=True, prepend=True
    )
    return ddp(model, mesh)


def test_samples_that_no_rank_shares_out_diverge_in_every_report(
    isoshard_check: Callable[..., Report], tmp_path: Path
) -> None:
    report = isoshard_check(
        lambda: Labelled(nn.Identity()),
        unshared,
        mesh={"dp": 2},
        batch={"input_ids": IDS, "labels": IDS},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        grad_scale=1,
        raises=False,
        keep=tmp_path,
    )

    assert report.exit_code == 1 and not report.conforms
    assert report.verdict.startswith("DIVERGES")
    (case,) = report.data["cases"]
    assert [f["name"] for f in case["findings"]] == ["input_ids", "labels"]
    assert case["findings"][0]["stage"] == "data ids"
    assert case["findings"][0]["ranks"] == [0, 1]
    assert verdicts_of(tmp_path / "report") == {(1, "DIVERGES")}


def inputs_of(folder: Path, mesh: dict[str, int], *steps: list[torch.Tensor]) -> Path:
    """A bundle of steps in each of which each rank reads ids."""
    for step, ranks in enumerate(steps):
        for rank, ids in enumerate(ranks):
            record = {"kind": "data_id", "name": "ids", "call": 0}
            record |= {"dtype": dtype_name(ids.dtype, "ids")}
            record |= {"local_shape": list(ids.shape), "layout": "infer"}
            _bundle.write_rank(folder, "run", rank, step, [Entry(record, ids)])
    axes = [{"axis": axis, "degree": degree} for axis, degree in mesh.items()]
    numbers = list(range(len(steps)))
    _bundle.seal(folder, {"schema": 2, "run": "run", "mesh": axes, "steps": numbers})
    return folder


@pytest.mark.parametrize("inputs", [IDS, IDS.double().masked_fill(IDS % 5 == 0, torch.nan)])
@pytest.mark.parametrize("mesh", [{"dp": 2, "cp": 2}, {"cp": 2, "dp": 2}])
def test_samples_that_are_not_shared_out_are_found_where_cp_cuts_them(
    tmp_path: Path, mesh: dict[str, int], inputs: torch.Tensor
) -> None:
    """No rank has as large an input as the single process, and copies over dp are equal."""
    reference = inputs_of(tmp_path / "reference", {"dp": 1}, [inputs[:, :6]])
    is_dp_first = next(iter(mesh)) == "dp"

    def cut(dp: int, cp: int, is_shared: bool) -> torch.Tensor:
        return (inputs.chunk(2)[dp] if is_shared else inputs)[:, 3 * cp : 3 * cp + 3].contiguous()

    def run(is_shared: bool) -> Path:
        places = [(r // 2, r % 2) if is_dp_first else (r % 2, r // 2) for r in range(4)]
        parts = [cut(dp, cp, is_shared) for dp, cp in places]
        return inputs_of(tmp_path / f"run{is_shared}", mesh, parts)

    (finding,) = check_samples(reference, run(False))
    assert (finding.step, finding.name) == (0, "ids")
    assert finding.ranks == ([0, 2] if is_dp_first else [0, 1])
    assert check_samples(reference, run(True)) == []


def test_equal_samples_that_are_shared_out_are_no_copies(tmp_path: Path) -> None:
    reference = inputs_of(tmp_path / "reference", {"dp": 1}, [IDS[:1, :6].expand(8, 6)])
    halves = [IDS[:1, 3 * cp : 3 * cp + 3].expand(4, 3).contiguous() for cp in (0, 1)]

    assert (
        check_samples(reference, inputs_of(tmp_path / "run", {"dp": 2, "cp": 2}, halves * 2)) == []
    )


def test_a_step_that_is_left_out_is_no_batch_for_each_process(tmp_path: Path) -> None:
    """Ranks read the samples of two steps in one, which are as many as the single process has."""
    first, second, other = IDS, IDS + 50, IDS + 100
    reference = inputs_of(tmp_path / "reference", {"dp": 1}, [first], [second])

    def run(name: str, ids: torch.Tensor) -> Path:
        ranks = [torch.cat([first.chunk(2)[dp], ids.chunk(2)[dp]]) for dp in (0, 1)]
        return inputs_of(tmp_path / name, {"dp": 2}, ranks)

    (skipped,) = check_samples(reference, run("skipped", second))
    assert skipped.cause.id == "optimizer_step_skipped"
    assert skipped.cause.numbers == {"steps": [0, 1]} and skipped.samples is None
    (own,) = check_samples(reference, run("own", other))
    assert own.cause.id == "own_samples_on_each_rank" and own.samples == 8
    each = inputs_of(tmp_path / "each", {"dp": 2}, [first, second])
    (shared,) = check_samples(reference, each)
    assert shared.cause.id == "own_samples_on_each_rank", "each rank reads the batch of one step"
