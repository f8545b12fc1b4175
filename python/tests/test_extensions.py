# SPDX-License-Identifier: Apache-2.0
"""Folders of C++ extensions: locks that a killed build left stop no run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from isoshard import _environment, _extensions, cli

#: What torch does while it builds an extension, for as long as standard input is open.
_BUILDS = """
import sys
from torch.utils.file_baton import FileBaton
baton = FileBaton(sys.argv[1])
assert baton.try_acquire()
print(flush=True)
sys.stdin.read()
baton.release()
"""


class Build:
    """A process that holds the lock of an extension."""

    def __init__(self, folder: Path) -> None:
        self.lock = folder / "one" / "lock"
        self.lock.parent.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BUILDS, str(self.lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None and self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        self.process.communicate()


def test_a_lock_is_left_when_its_build_was_killed_and_not_before(tmp_path: Path) -> None:
    build = Build(tmp_path)
    assert build.lock.exists() and _extensions.left_locks(tmp_path) == []
    build.kill()
    assert _extensions.left_locks(tmp_path) == [build.lock]
    _extensions.free({_extensions.VARIABLE: str(tmp_path)})
    assert not build.lock.exists()


def test_a_lock_that_is_released_meanwhile_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A builder closes its lock before it removes it. Another one may come after it."""
    lock = tmp_path / "one" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setattr(_extensions.time, "sleep", lambda seconds: lock.unlink())
    assert _extensions.left_locks(tmp_path) == []
    lock.touch()
    others = []

    def another(seconds: float) -> None:
        lock.unlink()
        others.append(lock.open("x"))

    monkeypatch.setattr(_extensions.time, "sleep", another)
    assert _extensions.left_locks(tmp_path) == []
    others[0].close()


def test_no_lock_is_left_where_open_files_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Build(tmp_path)
    build.kill()
    monkeypatch.setattr(_extensions, "_PROCESSES", tmp_path / "none")
    assert _extensions.left_locks(tmp_path) == []


def test_runs_have_a_folder_of_this_package_unless_the_user_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(_extensions.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(_environment.caches_of(tmp_path)[_extensions.VARIABLE])
    assert folder.is_dir() and folder.is_relative_to(tmp_path / "cache" / "isoshard")
    assert _environment.caches_of(tmp_path / "other")[_extensions.VARIABLE] == str(folder)

    monkeypatch.setenv(_extensions.VARIABLE, str(tmp_path / "own"))
    build = Build(tmp_path / "own")
    build.kill()
    caches = _environment.caches_of(tmp_path)
    assert _extensions.VARIABLE not in caches
    for _ in range(2):  # it is named once, and stays
        _extensions.free(caches)
    assert build.lock.exists() and capsys.readouterr().err.count(str(build.lock)) == 1


_SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.cpp_extension import _get_build_directory
from torch.utils.file_baton import FileBaton

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
baton = FileBaton(_get_build_directory("one", False) + "/lock")
baton.release() if baton.try_acquire() else baton.wait()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x in torch.randn(3, 4, 4):
    model(x.chunk(size)[rank]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.usefixtures("judge_program")
@pytest.mark.parametrize("is_freed", [True, False])
def test_a_run_goes_on_after_a_build_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_freed: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(_extensions.VARIABLE, raising=False)
    Build(Path(_extensions.variables()[_extensions.VARIABLE])).kill()
    if not is_freed:
        monkeypatch.setattr(_extensions, "free", lambda environment: None)
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    limit = "600" if is_freed else "5"
    words = ["judge", "--precision", "native", "--verbose", "--timeout", limit, "--steps", "1"]
    code = cli.main([*words, "--", torchrun, "--nproc-per-node", "2", str(script)])
    assert code == (0 if is_freed else 4)
