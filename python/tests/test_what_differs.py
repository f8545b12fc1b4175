# SPDX-License-Identifier: Apache-2.0
"""keep="what_differs": ranks compare while they run, and leave statistics, samples and findings."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_judge import EXAMPLES, judge, planted
from torch import nn

import isoshard
from isoshard import BundleError, RecordError, RunError, UsageError, _bundle, _program
from isoshard import _ranks_library as library
from isoshard._program import respond
from isoshard._what_differs import WhatDiffers


@pytest.fixture(scope="module", autouse=True)
def _needs_library(judge_program: str) -> None:
    try:
        library.find()
    except RunError as error:
        pytest.skip(str(error))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(64, width), nn.GELU()
        self.down_proj = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.up(x)))


def train(
    path: Path, *, fault: float = 1.0, width: int = 128, adam: bool = False, **options: Any
) -> None:
    torch.manual_seed(0)
    model = Mlp(width)
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1e-2)
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    with isoshard.record(path, model, optimizer, **options):
        for _ in range(2):
            for part in batch.chunk(2):
                (model(part).square().mean() / 2).backward()
            assert model.up.weight.grad is not None
            model.up.weight.grad[3].mul_(fault)
            optimizer.step()
            optimizer.zero_grad()


def make_reference(folder: Path, **options: Any) -> Path:
    reference = folder / "reference"
    train(reference, **options)
    perturbed = [folder / f"perturbed{i}" for i in range(3)]
    for i, path in enumerate(perturbed):
        train(path, perturb=i, keep="what_differs", reference=reference, **options)
        assert not any(path.rglob("*.safetensors")) or bytes_of(path) < bytes_of(reference)
    respond(reference, perturbed)
    return reference


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(tmp_path_factory.mktemp("sgd"))


def bytes_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def compare(reference: Path, run: Path, *options: str) -> tuple[int, str]:
    words = ["compare", str(reference), str(run), "--verbose", *options]
    return _program.call(words, capture=True)


def verdict_of(text: str) -> str:
    return next(line for line in text.splitlines() if re.match("CONFORMS|DIVERGES|VACUOUS", line))


def records_of(run: Path, step: int = 0) -> dict[str, dict[str, Any]]:
    records = _bundle.read_records(run, step, 0)["records"]
    return {f"{r['kind']}/{r['name']}/{r['call']}": r for r in records}


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adam"])
@pytest.mark.parametrize("fault", [1.0, 1.5], ids=["right", "wrong"])
def test_statistics_give_the_verdict_of_whole_tensors(
    tmp_path: Path, adam: bool, fault: float
) -> None:
    trusted = make_reference(tmp_path, adam=adam)
    train(tmp_path / "whole", fault=fault, adam=adam)
    more: dict[str, Any] = {"keep": "what_differs", "reference": trusted}
    train(tmp_path / "run", fault=fault, adam=adam, **more)

    code, whole = compare(trusted, tmp_path / "whole")
    other, text = compare(trusted, tmp_path / "run")

    assert code == other == (0 if fault == 1.0 else 1), text
    assert verdict_of(text).startswith(verdict_of(whole))
    assert "compared in the judged ranks, which kept" in verdict_of(text)
    assert "judged ranks" not in whole
    if fault != 1.0:
        assert "first gradient of up.weight (step 0)" in verdict_of(text)
        evidence = [line for line in whole.splitlines() if "confirmed by the controller" in line]
        assert evidence
        assert all(line in text for line in evidence)


def test_a_right_run_leaves_a_hundredth(tmp_path: Path) -> None:
    train(tmp_path / "reference", width=8192)
    more: dict[str, Any] = {"keep": "what_differs", "reference": tmp_path / "reference"}
    train(tmp_path / "run", width=8192, **more)
    train(tmp_path / "wrong", width=8192, fault=1.5, **more)

    whole = bytes_of(tmp_path / "reference")
    assert bytes_of(tmp_path / "run") <= 0.01 * whole
    assert bytes_of(tmp_path / "wrong") > 0.1 * whole
    assert compare(tmp_path / "reference", tmp_path / "run")[0] == 0


def test_only_what_differs_is_kept(tmp_path: Path, reference: Path) -> None:
    train(tmp_path / "run", fault=1.5, keep="what_differs", reference=reference)

    records = records_of(tmp_path / "run")
    tensors = _bundle.read_tensors(tmp_path / "run", 0, 0)
    assert "kept" not in records["grad/up.weight/0"]
    assert records["grad/down_proj.weight/0"]["kept"] is False
    assert tensors["grad/up.weight/0"].shape == (128, 64)
    assert tensors["sample/grad/down_proj.weight/0"].shape == (512,)
    assert "kept" not in records["scalar/loss/0"]
    assert "kept" not in records["data_id/input_ids/0"]
    assert "kept" not in records["grad/up.bias/0"]  # small


def test_what_exceeds_the_limit_is_let_go_and_told(
    tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WhatDiffers.__init__, "__kwdefaults__", {"kept_bytes": 0})
    train(tmp_path / "run", fault=1.5, keep="what_differs", reference=reference)

    assert records_of(tmp_path / "run")["grad/up.weight/0"]["kept"] is False
    code, text = compare(reference, tmp_path / "run")
    assert code == 1
    assert "first gradient of up.weight (step 0)" in verdict_of(text)
    assert "were not kept, so that their elements cannot be shown" in text


def edit(run: Path, key: str, changes: dict[str, Any]) -> None:
    content = json.loads((run / "step0000" / "rank00000.json").read_text())
    for record in content["records"]:
        if f"{record['kind']}/{record['name']}/{record.get('call', 0)}" == key:
            record["compared"][0].update(changes)
    _bundle.write_records(run, 0, 0, content)
    _bundle.reseal(run)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"digest": "0" * 16}, "equal tensors have equal digests"),
        ({"numel": 1}, "elements must be compared, got 1"),
        ({"max_abs": 1.0}, "fit each other"),
    ],
)
def test_forged_statistics_are_refused(
    tmp_path: Path, reference: Path, changes: dict[str, Any], words: str
) -> None:
    train(tmp_path / "run", keep="what_differs", reference=reference)
    assert compare(reference, tmp_path / "run")[0] == 0

    edit(tmp_path / "run", "grad/down_proj.weight/0", changes)

    code, text = compare(reference, tmp_path / "run")
    assert code == 3, text
    assert words in text


def test_forged_samples_are_refused(tmp_path: Path, reference: Path) -> None:
    train(tmp_path / "run", keep="what_differs", reference=reference)
    path = tmp_path / "run" / "step0000" / "rank00000.safetensors"
    tensors = _bundle.read_tensors(tmp_path / "run", 0, 0)
    tensors["sample/grad/down_proj.weight/0"][7] += 1e-3
    _bundle.write_safetensors(path, list(tensors.items()))
    _bundle.reseal(tmp_path / "run")

    code, text = compare(reference, tmp_path / "run")
    assert code == 3, text
    assert "its samples differ by more than it says" in text


def test_another_reference_is_refused(tmp_path: Path, reference: Path) -> None:
    other = make_reference(tmp_path / "other")
    train(tmp_path / "run", keep="what_differs", reference=other)

    code, text = compare(reference, tmp_path / "run")
    assert code == 3, text
    assert "got another reference" in text
    with pytest.raises(RunError, match="another reference"):
        respond(reference, [tmp_path / "other" / "perturbed0"])


def test_a_reference_must_be_whole(tmp_path: Path, reference: Path) -> None:
    train(tmp_path / "run", keep="what_differs", reference=reference)

    code, text = compare(tmp_path / "run", tmp_path / "run")
    assert code == 3
    assert "a trusted run must hold its tensors" in text
    with pytest.raises(BundleError, match="must be a bundle of one process"):
        train(tmp_path / "next", keep="what_differs", reference=tmp_path / "nothing")


def test_keeping_needs_a_reference(tmp_path: Path, reference: Path) -> None:
    for options in ({"keep": "what_differs"}, {"keep": "some"}, {"reference": reference}):
        with pytest.raises(UsageError, match="keep must be"):
            train(tmp_path / "run", **options)


def test_a_tensor_of_another_shape_is_kept(tmp_path: Path, reference: Path) -> None:
    train(tmp_path / "run", width=96, keep="what_differs", reference=reference)

    assert "kept" not in records_of(tmp_path / "run")["grad/up.weight/0"]
    code, text = compare(reference, tmp_path / "run")
    assert code == 1
    assert "has another shape" in text


def test_the_library_says_what_is_wrong(reference: Path) -> None:
    mesh = [{"axis": "dp", "degree": 1}]
    one = library.RanksLibrary(reference, rank=0, run="r", mesh=mesh, purpose="judged")
    record = {"kind": "grad", "name": "up.weight", "call": 0, "dtype": "fp32", "step": 0}

    with pytest.raises(RecordError, match="must have 8 bytes, got 4"):
        shapes = {"local_shape": [2], "global_shape": [2]}
        one.compare({**record, **shapes}, torch.zeros(1))
    one.close()
    one.close()


@pytest.mark.parametrize("fault", [False, True], ids=["right", "wrong"])
def test_ranks_find_places_as_the_driver_does(tmp_path: Path, fault: bool) -> None:
    """dp 2 x tp 2: rows of a layer may be cut over either axis, so that values must tell."""
    script = EXAMPLES / "tensor_parallel.py"
    if fault:
        old = "    optimizer.step()"
        doubled = "    if torch.distributed.get_world_size() > 1:\n        "
        new = f"{doubled}model[1].down.weight.grad.mul_(2)\n{old}"
        script = planted("tensor_parallel.py", old, new, tmp_path)
    options = ("--mesh", "dp=2,tp=2", "--output-dir", str(tmp_path / "out"))
    codes, lines = [], []
    for keep in ("what_differs", "everything"):
        code, text = judge(script, 4, "--tp", "2", options=(*options, "--keep", keep))
        codes.append(code)
        lines.append(verdict_of(text))
        if keep == "what_differs":
            kept = bytes_of(tmp_path / "out" / "run")
            layouts = [r.get("layout") for r in records_of(tmp_path / "out" / "run").values()]
            assert "infer" not in layouts
            assert bytes_of(tmp_path / "out" / "perturbed0") < kept

    assert codes == ([1, 1] if fault else [0, 0]), lines
    assert lines[0].startswith(lines[1])
    shutil.rmtree(tmp_path / "out")


_ALONE = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
if rank == 0:
    plain(torch.ones(2, 16))
model = nn.parallel.DistributedDataParallel(plain)
for x in torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(5)):
    part = x.chunk(world)[rank]
    nn.functional.mse_loss(model(part), part.flip(1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        plain(x)
    dist.barrier()
    if rank == 1:
        {wrong}
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("wrong", "code"), [("pass", 0), ("plain[0].bias.data.zero_()", 1)])
def test_a_rank_that_evaluates_alone_waits_for_no_other(
    tmp_path: Path, wrong: str, code: int
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_ALONE.format(wrong=wrong))
    options = ("--keep", "what_differs", "--precision", "native", "--timeout", "100")
    found, text = judge(script, 2, options=options)
    assert found == code, text
