# SPDX-License-Identifier: Apache-2.0
"""Kept worker processes: no answer of a case is taken for another one's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from isoshard import _workers
from isoshard._workers import Workers


def test_a_call_that_is_interrupted_leaves_no_answer_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server would answer later, and the next call would read that the old case is done."""
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=-1)
    workers = Workers()
    monkeypatch.setattr(workers, "_start", lambda: server)

    def interrupted(file: Any) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(_workers, "_receive", interrupted)

    with pytest.raises(KeyboardInterrupt):
        workers.run("a case", "a folder")

    assert workers._server is None
    assert server.wait(10) != 0


def test_ranks_that_were_ended_while_they_waited_are_started_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool of stand-ins for ranks, of which one was killed between two cases."""
    started: list[Pool] = []

    class Pool(_workers._Pool):
        def __init__(self, size: int) -> None:
            self.port, self.ranks = 0, []
            for _ in range(size):
                pid = os.fork()
                if pid == 0:
                    signal.pause()
                to, back = (os.open(os.devnull, mode) for mode in (os.O_WRONLY, os.O_RDONLY))
                rank = _workers._Rank(pid, os.fdopen(to, "wb"), os.fdopen(back, "rb"))
                self.ranks.append(rank)
            started.append(self)

        def start(self, job: bytes) -> None:
            assert self.is_whole()

        def wait(self, timeout: float) -> list[str]:
            return []

    monkeypatch.setattr(_workers, "_Pool", Pool)
    pools: dict[int, _workers._Pool] = {}
    arguments: tuple[Any, ...] = (pools, 2, [], b"", "folder", "run", 10.0)
    try:
        assert _workers._run_both(*arguments) is None
        os.kill(pools[2].ranks[1].pid, signal.SIGKILL)
        os.waitid(os.P_PID, pools[2].ranks[1].pid, os.WEXITED | os.WNOWAIT)

        assert _workers._run_both(*arguments) is None

        assert [len(pool.ranks) for pool in started] == [1, 0, 2]
    finally:
        for pool in pools.values():
            pool.close()


def test_answers_of_a_case_that_broke_off_are_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []

    class Pool:
        def __init__(self, size: int) -> None:
            self.ranks = [size]

        def is_whole(self) -> bool:
            return True

        def start(self, job: bytes) -> None:
            if self.ranks == [3]:
                raise BrokenPipeError

        def close(self) -> None:
            closed.extend(self.ranks)

    monkeypatch.setattr(_workers, "_Pool", Pool)

    with pytest.raises(BrokenPipeError):
        _workers._run_both({}, 3, [], b"", "folder", "run", 10.0)

    assert closed == [1, 3]  # the reference's process has got its job, and will answer


def test_a_rank_that_is_interrupted_ends_and_serves_nobody() -> None:
    """Ctrl-C reaches all processes of a terminal."""
    program = (
        "import os, signal\n"
        "from isoshard._workers import _Pool\n"
        "try:\n"
        "    rank = _Pool(1).ranks[0]\n"
        "except BaseException as error:\n"
        "    print('a rank came back with', type(error).__name__, flush=True)\n"
        "    os._exit(1)\n"
        "os.kill(rank.pid, signal.SIGINT)\n"
        "os.waitpid(rank.pid, 0)\n"
        "print('ended', flush=True)\n"
    )

    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )

    assert result.stdout == "ended\n", result.stdout + result.stderr
