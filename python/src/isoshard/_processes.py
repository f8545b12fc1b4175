# SPDX-License-Identifier: Apache-2.0
"""Ends processes with all that they started, ties children to their parent, and saves them time."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """On Linux the kernel ends this process when its parent ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Imports in the block do not look for garbage, which takes a sixth of the time of torch's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def descendants(pids: Sequence[int]) -> list[int]:
    """The processes that these started, and what those started, as /proc says."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: list[int] = []
    waiting = list(pids)
    while waiting:
        mine = children.get(waiting.pop(), [])
        found += mine
        waiting += mine
    return found


def end_processes(pids: Sequence[int], grace: float = _GRACE_SECONDS) -> None:
    """SIGTERM to processes, then SIGKILL to them and to all that they started."""
    below = descendants(pids)
    _signal(pids, signal.SIGTERM)
    end = time.monotonic() + grace
    while time.monotonic() < end and any(_runs(pid) for pid in (*pids, *below)):
        time.sleep(0.05)
    below += [pid for pid in descendants([*pids, *below]) if pid not in below]
    _signal([*pids, *below], signal.SIGKILL)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        if Path("/proc/self").exists():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    return state not in ("Z", "X")
