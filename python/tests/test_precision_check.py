# SPDX-License-Identifier: Apache-2.0
"""isoshard.check and isoshard.record in each precision."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_runs import needs
from torch import nn

from isoshard import Divergence, Report, UsageError, record

pytestmark = needs("torch")
_IDS = torch.randint(0, 50, (12, 7), generator=torch.Generator().manual_seed(1))


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.relu(self.up(self.embed(ids)))).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _coarse() -> nn.Module:
    return _Mlp().bfloat16()


def _ddp(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def _ddp_with_a_factor(model: nn.Module, mesh: Any) -> nn.Module:
    model.get_parameter("up.bias").register_hook(lambda gradient: 1.004 * gradient)
    return _ddp(model, mesh)


def _ddp_with_a_scaler(model: nn.Module, mesh: Any) -> nn.Module:
    torch.amp.GradScaler("cpu")
    return _ddp(model, mesh)


def _ddp_of_float64(model: nn.Module, mesh: Any) -> nn.Module:
    if torch.finfo(torch.float32).eps < 1e-9:
        model.get_parameter("up.bias").register_hook(lambda g: g * 1.5)
    return _ddp(model, mesh)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _checked(check: Callable[..., Report], parallelize: Any, precision: str, **more: Any) -> Report:
    arguments = {"mesh": {"dp": 2}, "batch": _IDS, "optimizer": _sgd, "raises": False} | more
    return check(_coarse, parallelize, precision=precision, **arguments)


def test_10_check_judges_in_each_precision(isoshard_check: Callable[..., Report]) -> None:
    for precision in ("native", "float64", "both"):
        right = _checked(isoshard_check, _ddp, precision)
        wanted = ["native", "float64"] if precision == "both" else [precision]
        assert right.conforms, right.text
        assert [(o.precision, o.code) for o in right.outcomes] == [(p, 0) for p in wanted]
        wrong = _checked(isoshard_check, _ddp_with_a_factor, precision)
        codes = [o.code for o in wrong.outcomes]
        assert codes == [int(p == "float64") for p in wanted], wrong.text
        assert wrong.exit_code == max(codes) and wrong.conforms == (max(codes) == 0)
        assert wrong.verdict.startswith("CONFORMS" if wrong.conforms else "DIVERGES"), wrong.text
    with pytest.raises(Divergence, match="scale 1.004"):
        _checked(isoshard_check, _ddp_with_a_factor, "both", raises=True)


def test_10_a_kept_worker_has_notes_of_its_case_alone(
    isoshard_check: Callable[..., Report],
) -> None:
    first = _checked(isoshard_check, _ddp_with_a_scaler, "float64")
    second = _checked(isoshard_check, _ddp, "float64")
    notes = [report.outcomes[0].notes for report in (first, second)]
    assert len(notes[0]) == len(notes[1]) + 1 and set(notes[1]) < set(notes[0])


def test_10_check_gives_no_verdict_where_float64_changed_the_program(
    isoshard_check: Callable[..., Report],
) -> None:
    """The reference takes part in parallelize, so that it is changed, too."""
    more = {"parallel_reference": True}
    report = _checked(isoshard_check, _ddp_of_float64, "both", **more)
    assert (report.conforms, report.float64) == (True, None), report.text
    assert report.outcomes[1].code is None and "up.bias" in report.outcomes[1].why


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ([], None),
        (["--isoshard-precision", "float64"], "float64"),
        (["-o", "isoshard_precision=native"], "native"),
        (["-o", "isoshard_precision=native", "--isoshard-precision", "both"], "both"),
    ],
)
def test_10_options_of_pytest_choose_the_precision(
    tmp_path: Path, options: list[str], given: str | None
) -> None:
    """An option of the command line comes before the one of a file; with none check chooses."""
    (tmp_path / "conftest.py").write_text(
        "import types\n"
        "from isoshard import _level3\n"
        "def check(*arguments, **named):\n"
        f"    assert named['precision'] == {given!r}\n"
        f"    open({str(tmp_path / 'seen')!r}, 'w').close()\n"
        "    return types.SimpleNamespace(conforms=True)\n"
        "_level3.check = check\n"
    )
    (tmp_path / "test_given.py").write_text("def test(isoshard_check):\n    isoshard_check()\n")
    words = ["-m", "pytest", "-q", "-p", "isoshard.pytest_plugin", *options, str(tmp_path)]
    program = [sys.executable, *words]
    result = subprocess.run(program, cwd=tmp_path, capture_output=True, check=False)
    assert result.returncode == 0 and (tmp_path / "seen").exists(), result.stdout


def test_10_record_is_of_the_precision_of_its_process(tmp_path: Path) -> None:
    model = _Mlp()
    for precision in ("float64", "both"):
        with (
            pytest.raises(UsageError),
            record(tmp_path, model, _sgd(model.parameters()), precision=precision),
        ):
            pass
    optimizer = _sgd(model.parameters())
    with record(tmp_path / "a", model, optimizer, precision="native", steps=1):
        model(_IDS).backward()
        optimizer.step()
