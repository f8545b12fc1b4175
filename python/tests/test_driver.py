# SPDX-License-Identifier: Apache-2.0
"""The driver of level 0: what it accepts as a run, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from isoshard import Divergence, RecordError, RunError, UsageError, _bundle, _fork
from isoshard._auto import FINDING
from isoshard._judge import Driver, JudgeOptions, Seconds, _clear, _mesh_of
from isoshard._launch import asked_world_size, recognise
from isoshard.cli import main
from isoshard.errors import BundleError, IsoshardError

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
PYTHON = str(Path(sys.executable).parent / "python")


class Ended:
    """Processes that have ended with these codes."""

    def __init__(self, codes: list[int]) -> None:
        self.codes = codes

    def wait(self, limit: float, tick: Any) -> list[int]:
        return self.codes

    def kill(self) -> None:
        pass


def wait(tmp_path: Path, process: Any, run: str, timeout: float = 60) -> None:
    options = JudgeOptions([PYTHON, "x.py"], mesh="dp=2", execute=True, timeout=timeout)
    driver = Driver(options, tmp_path, Seconds())
    driver._wait(tmp_path / "run", (process, run), is_reference=False)


def bundle(path: Path, run: str) -> Path:
    path.mkdir()
    (path / "manifest.json").write_text(json.dumps({"run": run}))
    return path


def test_a_forked_rank_has_its_pool_of_threads_before_it_starts_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _fork.one_thread()
    calls: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if calls == [torch.get_num_threads()] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not calls


def test_only_a_bundle_of_this_start_is_judged(tmp_path: Path) -> None:
    bundle(tmp_path / "run", "old")
    with pytest.raises(RunError, match="ended well without"):
        wait(tmp_path, Ended([0, 0]), "new")
    wait(tmp_path, Ended([0, 0]), "old")


def test_a_crash_after_the_bundle_is_an_error(tmp_path: Path) -> None:
    bundle(tmp_path / "run", "new")
    with pytest.raises(RunError, match=r"exit codes \[0, 7\] after the steps were recorded"):
        wait(tmp_path, Ended([0, 7]), "new")


def test_an_error_that_a_rank_left_counts(tmp_path: Path) -> None:
    bundle(tmp_path / "run", "new")
    (tmp_path / "run.errors").mkdir()
    (tmp_path / "run.errors" / "rank00001.txt").write_text("it rained\n")
    with pytest.raises(RunError, match="it rained"):
        wait(tmp_path, Ended([0, 0]), "new")


def test_a_finding_of_one_rank_is_a_divergence_and_no_error(tmp_path: Path) -> None:
    """Other ranks fail by it, before or after."""
    errors = tmp_path / "run.errors"
    errors.mkdir()
    (errors / "rank00000.txt").write_text("connection closed by peer\n")
    (errors / f"rank00001{FINDING}").write_text("it is not trained\n")
    with pytest.raises(Divergence, match="it is not trained") as caught:
        wait(tmp_path, Ended([1, 1]), "new")
    assert caught.value.exit_code == 1


def test_what_an_older_start_left_is_removed(tmp_path: Path) -> None:
    bundle(tmp_path / "run", "old")
    (tmp_path / "run.errors").mkdir()
    (tmp_path / "run.logs").mkdir()
    for name in ("errors/rank00000.txt", f"errors/rank00000{FINDING}", "logs/rank00000.log"):
        (tmp_path / f"run.{name}").write_text("")
    _clear(tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["run/thesis.txt", "run/step1000/model.pt", "run.logs/thesis.txt"])
def test_a_folder_of_others_is_not_removed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("years of work")
    with pytest.raises(UsageError, match="--output-dir"):
        _clear(tmp_path / "run")
    assert path.exists()


def test_a_timeout_names_its_option_and_ends_descendants(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = (
        "import os, pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, child])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    with pytest.raises(RunError, match=r"within 0.1 seconds.*--timeout"):
        wait(tmp_path, process, "new", timeout=0.1)
    stat = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    end = time.monotonic() + 5
    while stat.exists() and " Z " not in stat.read_text() and time.monotonic() < end:
        time.sleep(0.01)
    assert time.monotonic() < end


@pytest.mark.parametrize(
    "words",
    [
        [TORCHRUN, "--nproc-per-node", "2", "--signals-to-handle", "SIGTERM", "t.py"],
        [TORCHRUN, "--nproc-per", "2", "t.py"],
        [TORCHRUN, "-nproc_per_node", "2", "t.py"],
        [TORCHRUN, "---nproc_per_node", "2", "t.py"],
        [TORCHRUN, "--nproc-per-node", "2", "--m", "t.py"],
        [TORCHRUN, "--nproc-per-node", "2", "--", "t.py"],
        [TORCHRUN, "--nproc-per-node", "2", "--unknown", "t.py"],
        [TORCHRUN, "--standalone=yes", "--nproc-per-node", "2", "t.py"],
        [TORCHRUN, "--nproc-per-node", "2", "--nproc_per_node", "1", "t.py"],
        [TORCHRUN, "--nproc-per-node", "²", "t.py"],
        [PYTHON, "-m", "torch.distributed.launch", "--use-env", "--nproc_per_node=2", "t.py"],
        [PYTHON, "-m", "torch.distributed.launch", "--nproc_per_node=2", "t.py"],
    ],
)
def test_options_that_are_not_known_leave_a_command_untouched(words: list[str]) -> None:
    assert recognise(words) is None


def test_options_in_the_environment_leave_a_command_untouched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [TORCHRUN, "--nproc-per-node", "2", "t.py"]
    assert recognise(words) is not None
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    assert recognise(words) is None
    assert asked_world_size(words) is None


def test_the_mesh_is_what_the_launcher_is_asked_for() -> None:
    words = ["/elsewhere/torchrun", "--nproc-per-node", "3", "t.py"]
    assert str(_mesh_of(JudgeOptions(words))) == "dp=3"
    assert str(_mesh_of(JudgeOptions(["bash", "run.sh"], mesh="tp=2"))) == "tp=2"


@pytest.mark.parametrize(
    ("words", "is_forked"),
    [
        (["env", "A=1", PYTHON, "t.py", "--steps", "3"], True),  # as mpirun would start ranks
        ([PYTHON, "t.py", "--steps", "3"], False),  # it starts its ranks itself
    ],
)
def test_the_reference_of_a_launcher_that_is_not_known_is_forked(
    tmp_path: Path, words: list[str], is_forked: bool
) -> None:
    driver = Driver(JudgeOptions(words, mesh="dp=2"), tmp_path, Seconds())

    launch, command = driver._single_launch()

    assert (launch is not None) == is_forked
    if launch is not None:
        assert (launch.script, launch.arguments) == ("t.py", ["--steps", "3"])
    else:
        assert command == [sys.executable, "t.py", "--steps", "3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", TORCHRUN, "t.py"], "two processes or more, got one"),
        (["--", "bash", "run.sh"], "--mesh must be given"),
        (["--mesh", "dp=4", "--", TORCHRUN, "--nproc-per-node", "2", "t.py"], "for 2 processes"),
        (["--mesh", "dp=1", "--", "bash", "run.sh"], "two processes or more, got one"),
        (["--grad-scale", "0", "--", TORCHRUN, "t.py"], "--grad-scale must be a number above 0"),
        (["--timeout", "nan", "--", TORCHRUN, "t.py"], "--timeout must be a number above 0"),
        (["--steps", "0", "--", TORCHRUN, "t.py"], "--steps must be 1 or more"),
    ],
)
@pytest.mark.usefixtures("judge_program")
def test_what_cannot_be_judged_is_refused_first(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["judge", *words]) == 2
    assert message in capsys.readouterr().err


def test_two_writers_of_a_rank_are_an_error(tmp_path: Path) -> None:
    entry = _bundle.Entry({"kind": "param", "name": "w", "call": 0}, torch.ones(2))
    _bundle.prepare_folder(tmp_path / "a", "x")
    _bundle.write_rank(tmp_path / "a", "x", 1, 0, [entry])
    with pytest.raises(RecordError, match="files of rank 1, got a second one"):
        _bundle.write_rank(tmp_path / "a", "x", 1, 0, [entry])
    with pytest.raises(RecordError, match="files of rank 0, got a second one"):
        _bundle.prepare_folder(tmp_path / "a", "x")
    _bundle.seal(tmp_path / "a", {"run": "x"})
    with pytest.raises(RecordError, match="files of rank 0, got a second one"):
        _bundle.prepare_folder(tmp_path / "a", "x")
    _bundle.prepare_folder(tmp_path / "a", "y")
    assert [p.name for p in (tmp_path / "a").iterdir()] == [".writing-y"]


def test_a_record_twice_is_an_error(tmp_path: Path) -> None:
    entry = _bundle.Entry({"kind": "param", "name": "w", "call": 0}, torch.ones(2))
    with pytest.raises(RecordError, match="got param/w/0 twice"):
        _bundle.write_rank(tmp_path / "a", "x", 0, 0, [entry, entry])


def test_a_failure_of_this_program_is_no_divergence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: JudgeOptions) -> int:
        raise KeyError("mesh")

    monkeypatch.setattr("isoshard.cli.judge", fail)
    assert main(["judge", "--", TORCHRUN, "t.py"]) == 4
    assert "this program failed (KeyError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(Divergence, 1), (BundleError, 3), (RunError, 4), (IsoshardError, 4)]
)
def test_errors_have_their_exit_codes(
    monkeypatch: pytest.MonkeyPatch, error: type[IsoshardError], code: int
) -> None:
    def fail(options: JudgeOptions) -> int:
        raise error("x must be y, got z")

    monkeypatch.setattr("isoshard.cli.judge", fail)
    assert main(["judge", "--", TORCHRUN, "t.py"]) == code


@pytest.mark.parametrize("words", [["--grad-scale", "two"], ["--timeout", "1h"]])
def test_a_bad_number_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["judge", *words, "--", TORCHRUN, "t.py"])
    assert caught.value.code == 2


@pytest.mark.parametrize("text", ["[]", "{", '{"files": {"../x": ""}}', '{"files": {}, "mesh": 3}'])
@pytest.mark.usefixtures("judge_program")
def test_compare_says_of_a_malformed_bundle_that_it_is_one(tmp_path: Path, text: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layouts = {'param/*': 'copy'}", 'must be "infer", "replicate"'),
        ("import nothing_of_that_name", "must run by itself, got ModuleNotFoundError"),
        ("colour = 1", "must define one of rename"),
        ("activation = 1; rename = (", "must run by itself, got SyntaxError"),
    ],
)
@pytest.mark.usefixtures("judge_program")
def test_a_mistake_in_the_options_is_told_before_anything_runs(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "options.py").write_text(text)
    words = [
        "judge",
        "--options",
        str(tmp_path / "options.py"),
        "--output-dir",
        str(tmp_path / "o"),
    ]
    assert main([*words, "--", TORCHRUN, "--nproc-per-node", "2", "t.py"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_reference_command_must_be_one() -> None:
    words = ["--", TORCHRUN, "--nproc-per-node", "2", "t.py"]
    assert main(["judge", "--reference-command", "python 'train.py", *words]) == 2
    assert main(["judge", "--reference-command", "", *words]) == 2


def test_an_error_before_the_script_is_in_the_log(tmp_path: Path) -> None:
    from isoshard import _fork
    from isoshard._auto import AutoConfig
    from isoshard._launch import Launch

    config = AutoConfig(str(tmp_path / "run"), options_file=str(tmp_path / "gone.py"))
    world = _fork.start(Launch("python", 1, "t.py"), config, tmp_path / "run.logs", "x")
    assert world.wait(60) == [1]
    log = (tmp_path / "run.logs" / "rank00000.log").read_text()
    assert "Traceback" in log and "The options file must exist" in log


def test_ranks_that_do_not_end_are_ended(tmp_path: Path) -> None:
    from isoshard import _fork
    from isoshard._auto import AutoConfig
    from isoshard._launch import Launch

    script = tmp_path / "t.py"
    script.write_text("import time\ntime.sleep(60)\n")
    start = Launch("python", 2, str(script))
    world = _fork.start(start, AutoConfig(str(tmp_path / "run")), tmp_path / "run.logs", "x")
    with pytest.raises(RunError, match="--timeout"):
        wait(tmp_path, world, "x", timeout=0.2)
    assert all(code is not None and code < 0 for code in world.codes)


def test_a_script_that_raised_is_an_error_without_a_launcher_s_code(tmp_path: Path) -> None:
    from isoshard._auto import VARIABLE, AutoConfig

    script = tmp_path / "t.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\noptimizer.step()\nraise KeyError('coffee')\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(_bundle.__file__).parent / "_site"),
        VARIABLE: AutoConfig(str(tmp_path / "run")).to_text(),
        "ISOSHARD_RUN_ID": "x",
    }
    assert subprocess.run([sys.executable, str(script)], env=environment, check=False).returncode
    assert not (tmp_path / "run" / "manifest.json").exists()
    (tmp_path / "run" / "manifest.json").write_text('{"run": "x"}')
    with pytest.raises(RunError, match="got KeyError on rank 0"):
        wait(tmp_path, Ended([0]), "x")


def test_the_package_does_not_import_torch_by_itself() -> None:
    code = "import sys, isoshard; sys.exit('torch' in sys.modules or not isoshard.errors)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import isoshard._steps, isoshard; assert callable(isoshard.record and isoshard.check)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_license_is_in_the_package() -> None:
    folder = Path(__file__).parents[1]
    assert 'license = "Apache-2.0"' in (folder / "pyproject.toml").read_text()
    assert "Apache License" in (folder / "LICENSE").read_text()


def test_buffers_that_deepspeed_leaves_are_removed_and_no_others(tmp_path: Path) -> None:
    uid = os.getuid()
    ours = f"deepspeed_allreduce_buffer_{uid}_127.0.0.1_29511_0"
    others = [
        f"deepspeed_allreduce_buffer_{uid}_127.0.0.1_29512_0",
        f"deepspeed_allreduce_buffer_{uid + 1}_127.0.0.1_29511_0",
        "29511_0",
    ]
    for name in [ours, *others]:
        (tmp_path / name).touch()

    _fork.sweep(29511, tmp_path)

    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(others)


def test_a_reference_of_several_ranks_is_refused_before_any_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = ["judge", "--reference-command", "torchrun --nproc-per-node 2 t.py --lr 1"]
    assert main([*words, "--", "torchrun", "--nproc-per-node", "2", "t.py"]) == 2
    assert "--reference-command 'python t.py --lr 1'" in capfd.readouterr().err


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    for side, run in (("a", "x"), ("b", "x"), ("c", "y")):
        bundle(tmp_path / side, run)

    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) != 2


@pytest.mark.parametrize(("asked", "at", "said"), [(2, [], "1 of 2"), (2, [0, 1, 3], "2 of 3")])
def test_fewer_steps_than_asked_for_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: int, at: list[int], said: str
) -> None:
    driver = object.__new__(Driver)
    driver.options = JudgeOptions(["x"], steps=asked, at_steps=at)
    made = [0, 1] if at else [0]
    (tmp_path / "manifest.json").write_text(json.dumps({"run": "x", "steps": made}))
    driver._tell_missing_steps(tmp_path)
    assert said in capsys.readouterr().out

    driver.options = JudgeOptions(["x"], steps=len(made))
    driver._tell_missing_steps(tmp_path)
    assert not capsys.readouterr().out
