# SPDX-License-Identifier: Apache-2.0
"""The journal of collectives: what is seen, and what the judge makes of it."""

from __future__ import annotations

import collections
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from isoshard import _bundle, _calls, _fork, _launch, cli
from isoshard._auto import AutoConfig, error_folder

EXAMPLES = Path(__file__).parents[2] / "examples" / "pytorch"

#: Data parallelism by hand: three matrices of one size, a head of another one.
BY_HAND = """
import os
import torch
import torch.distributed as dist
from torch import nn

if "RANK" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
    dist.init_process_group("gloo")
size = dist.get_world_size() if dist.is_initialized() else 1
rank = dist.get_rank() if dist.is_initialized() else 0
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)], nn.Linear(8, 40))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
for step, batch in enumerate(data):
    model(batch.chunk(size)[rank]).square().mean().backward()
    names = [n for n, _ in model.named_parameters()]
    gradients = {n: p.grad for n, p in model.named_parameters()}
    # PLANT
    if size > 1:
        for name in names:
            dist.all_reduce(gradients[name])
            gradients[name].div_(size)
        # BEHIND
    optimizer.step()
    optimizer.zero_grad()
    # BETWEEN
"""
HAND_RANKS = 2


def recorded(script: Path, ranks: int, folder: Path, *words: str, mesh: str | None = None) -> Path:
    """The bundle of three steps of a script."""
    _fork.prepare(str(script))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launch = _launch.recognise([*torchrun, str(script), *words])
    assert launch is not None
    path = folder / "run"
    config = AutoConfig(str(path), mesh=mesh or f"dp={ranks}", steps=3)
    codes = _fork.start(launch, config, folder / "run.logs", uuid.uuid4().hex[:16]).wait(120)
    errors = [p.read_text() for p in error_folder(path).glob("*.txt")]
    assert codes == [0] * ranks and not errors, (codes, errors, logs_of(folder))
    return path


def logs_of(folder: Path) -> str:
    return "\n".join(p.read_text() for p in sorted((folder / "run.logs").glob("*.log")))


def journal(path: Path, step: int, rank: int) -> dict[str, Any]:
    content: dict[str, Any] = _bundle.read_records(path, step, rank)["journal"]
    assert "problem" not in content
    return content


def counts(path: Path, step: int, rank: int) -> dict[tuple[str, str], int]:
    calls = journal(path, step, rank)["calls"]
    return dict(collections.Counter((c["op"], c["phase"]) for c in calls))


def written(folder: Path, **plants: str) -> Path:
    text = BY_HAND
    for mark, plant in plants.items():
        assert f"# {mark}" in text
        text = text.replace(f"# {mark}", plant)
    script = folder / "by_hand.py"
    script.write_text(text)
    return script


# -- what is seen --------------------------------------------------------------------------------


def test_the_reducer_of_ddp_is_seen(tmp_path: Path) -> None:
    run = recorded(EXAMPLES / "ddp.py", 2, tmp_path)

    assert counts(run, 0, 1)["all_reduce", "backward"] == 1
    assert counts(run, 0, 1)["broadcast", "between"] == 2  # of the constructor
    assert counts(run, 1, 1)["broadcast", "between"] == 2  # where buckets lie
    assert counts(run, 2, 1) == {("all_reduce", "backward"): 1}
    call = journal(run, 2, 0)["calls"][0]
    assert (call["reduction"], call["dtype"], call["bytes"]) == ("sum", "fp32", 10888)
    assert journal(run, 2, 0)["groups"] == {call["group"]: [0, 1]}


def test_fsdp2_is_seen(tmp_path: Path) -> None:
    run = recorded(EXAMPLES / "fsdp2.py", 3, tmp_path)

    for step in range(3):
        found = counts(run, step, 2)
        assert found["all_gather", "forward"] == 4
        assert found["reduce_scatter", "backward"] == 4
        assert found["all_reduce", "update"] == 1  # the norm that gradients are clipped to


def test_tensor_parallelism_is_seen_over_each_group(tmp_path: Path) -> None:
    run = recorded(EXAMPLES / "tensor_parallel.py", 4, tmp_path, "--tp", "2", mesh="dp=2,tp=2")

    found = journal(run, 1, 3)
    by_ranks = collections.Counter(
        (tuple(found["groups"][c["group"]]), c["op"]) for c in found["calls"]
    )
    assert by_ranks[(2, 3), "all_reduce"] == 8
    assert by_ranks[(1, 3), "reduce_scatter"] == 8


def test_a_call_has_its_line_and_its_tensor(tmp_path: Path) -> None:
    run = recorded(written(tmp_path), 2, tmp_path)

    calls = journal(run, 0, 1)["calls"]
    assert [c.get("of") for c in calls] == [
        "gradient of 0.weight",
        "gradient of 1.weight",
        "gradient of 2.weight",
        "gradient of 3.weight",
        "gradient of 3.bias",
    ]
    assert {c["phase"] for c in calls} == {"update"}
    line = 1 + BY_HAND.splitlines().index("            dist.all_reduce(gradients[name])")
    assert {c["at"] for c in calls} == {f"by_hand.py:{line}"}


ALL = """
        t = torch.ones(4)
        pieces = [torch.ones(2), torch.ones(2)]
        dist.broadcast(t, src=1)
        dist.reduce(t, dst=1, op=dist.ReduceOp.MAX)
        dist.all_gather(pieces, torch.ones(2))
        dist.reduce_scatter(torch.ones(2), pieces, op=dist.ReduceOp.MIN)
        dist.scatter(torch.ones(2), pieces if rank == 0 else None, src=0)
        dist.gather(torch.ones(2), pieces if rank == 0 else None, dst=0)
        dist.all_to_all_single(torch.ones(4), t, async_op=True).wait()
        (dist.send if rank == 0 else dist.recv)(torch.ones(3), 1 - rank)
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(torch.ones(5), "sum", dist.group.WORLD.group_name)
        )
        dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.BOR)
        dist.barrier()
"""


def test_every_operation_is_seen(tmp_path: Path) -> None:
    run = recorded(written(tmp_path, BEHIND=ALL.strip()), 2, tmp_path)

    for rank in (0, 1):
        calls = journal(run, 1, rank)["calls"][5:]
        rows = [(c["op"], c.get("reduction"), c["bytes"], c.get("peer")) for c in calls]
        assert rows == [
            ("broadcast", None, 16, 1),
            ("reduce", "max", 16, 1),
            ("all_gather", None, 8, None),
            ("reduce_scatter", "min", 16, None),
            ("scatter", None, 8, 0),
            ("gather", None, 8, 0),
            ("all_to_all", None, 16, None),
            ("send" if rank == 0 else "recv", None, 12, 1 - rank),
            ("all_reduce", "sum", 20, None),
            ("all_reduce", "bor", 16, None),
            ("barrier", None, 0, None),
        ]


OWN = """
        from isoshard._calls import not_journaled, unjournaled
        with unjournaled():
            dist.all_reduce(torch.ones(3))
        not_journaled(dist.all_reduce)(torch.ones(3))
"""


def test_calls_of_the_recorder_itself_do_not_count(tmp_path: Path) -> None:
    run = recorded(written(tmp_path, BEHIND=OWN.strip()), 2, tmp_path)

    assert len(journal(run, 1, 0)["calls"]) == 5


def test_nothing_is_journaled_without_a_recorder() -> None:
    journal = _calls.Journal()
    journal.start()
    journal.stop()

    assert journal not in _calls._journals
    assert journal.take() == {"groups": {}, "calls": []}


# -- what the judge says -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(judge_program: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The single process of BY_HAND, judged once as it is."""
    folder = tmp_path_factory.mktemp("reference")
    code, _ = judged(written(folder), folder / "out")
    assert code == 0
    return folder / "out" / "reference"


def judged(script: Path, output: Path, *options: str) -> tuple[int, dict[str, Any]]:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    words = ["judge", "--quiet", "--steps", "3", "--output-dir", str(output), *options, "--"]
    words += [torchrun, "--nproc-per-node", str(HAND_RANKS), str(script)]
    code = cli.main(words)
    report = json.loads((output / "report" / "report.json").read_text())
    return code, report


def findings(report: dict[str, Any]) -> list[str]:
    text = json.dumps(report)
    return [line for line in text.split('"') if line.startswith("calls over ranks")]


TWICE_FOR_ANOTHER = "names = [names[1], *names[1:]] if rank == 1 and step == 1 else names"


@pytest.mark.parametrize(
    ("plants", "first"),
    [
        (
            {"PLANT": TWICE_FOR_ANOTHER},
            "calls over ranks 0, 1 (step 1): gradient of 1.weight is reduced 2 times, not 1; "
            "gradient of 0.weight: never",
        ),
        (
            # what rank 1 lacks in step 1 it calls before step 2, so that all ranks come to the end
            {
                "PLANT": "names = [n for n in names[::-1] if (n[0], rank, step) != ('1', 1, 1)]",
                "BETWEEN": "if (rank, step) == (1, 1): dist.all_reduce(torch.zeros(8, 8))",
            },
            "calls over ranks 0, 1 (step 1): call 4 of 5 is missing, all_reduce (sum) of 256 bytes "
            "in fp32 (gradient of 1.weight, update, by_hand.py:",
        ),
        (
            {
                "BEHIND": "if step == 1: dist.all_reduce(torch.zeros(99))",
            },
            "calls over ranks 0, 1 (step 1): all_reduce (sum) in fp32: 6 calls of 2604 bytes in "
            "all, in step 0 5 calls of 2208 bytes in all; call 6 of 6 is one too many, all_reduce "
            "(sum) of 396 bytes in fp32 (update, by_hand.py:",
        ),
        (
            {"BEHIND": "dist.all_reduce(torch.zeros(9).to(torch.int32 if rank else torch.float))"},
            "calls over ranks 0, 1 (step 0): call 6 of 6 must be all_reduce (sum) of 36 bytes in "
            "fp32 (update, by_hand.py:",
        ),
        (
            {
                "BEHIND": "dist.all_reduce(torch.zeros(9), op=[dist.ReduceOp.SUM, "
                "dist.ReduceOp.MAX][rank])"
            },
            "got all_reduce (max) of 36 bytes in fp32",
        ),
    ],
    ids=["another gradient twice", "one skipped", "twice in step 1", "dtype", "reduction"],
)
def test_a_wrong_call_is_named(
    tmp_path: Path, reference: Path, plants: dict[str, str], first: str
) -> None:
    script = written(tmp_path, **plants)
    code, report = judged(script, tmp_path / "out", "--reference", str(reference))

    assert code == 1
    assert any(first in text for text in findings(report)), findings(report)


def test_calls_that_compute_nothing_wrong_are_findings_that_can_be_allowed(
    tmp_path: Path, reference: Path
) -> None:
    plant = "dist.all_reduce(torch.zeros(9).to(torch.int32 if rank else torch.float))"
    script = written(tmp_path, BEHIND=plant)
    options = ("--reference", str(reference), "--not-recorded", "scalar/calls.*")
    code, _ = judged(script, tmp_path / "out", *options)

    assert code == 0


def test_what_is_logged_between_steps_is_free(tmp_path: Path, reference: Path) -> None:
    plants = {
        "BETWEEN": "if size > 1 and step != 1: dist.all_reduce(torch.ones(500))",
        "BEHIND": "if step % 2: dist.all_reduce(torch.ones(2))",
    }
    script = written(tmp_path, **plants)
    code, report = judged(script, tmp_path / "out", "--reference", str(reference))

    assert code == 0, findings(report)


@pytest.mark.parametrize(
    ("name", "ranks", "words", "mesh"),
    [
        ("ddp.py", 2, [], "dp=2"),
        ("fsdp2.py", 3, [], "dp=3"),
        ("tensor_parallel.py", 4, ["--tp", "2"], "dp=2,tp=2"),
    ],
)
def test_right_runs_of_three_steps_have_no_finding(
    judge_program: str,
    tmp_path: Path,
    name: str,
    ranks: int,
    words: list[str],
    mesh: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    command = ["judge", "--steps", "3", "--mesh", mesh, "--verbose", "--", torchrun]
    command += ["--nproc-per-node", str(ranks), str(EXAMPLES / name), *words]
    code = cli.main(command)

    text = capfd.readouterr().out
    assert code == 0, text
    assert f"journaled calls of {ranks} ranks in 3 steps were compared" in text
