# SPDX-License-Identifier: Apache-2.0
"""`isoshard preflight`: does the installed backend compute what it should, before any training?

Ranks are started by a launcher, or here by fork. Results travel through the store of the
rendezvous, not through the backend that is tried.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ._preflight_ops import DTYPES, Case, Place, cases, is_exact, perform
from ._preflight_table import Results, code_of, text_of, to_json
from ._processes import die_with_parent, end_processes
from .errors import RunError, UsageError

DIED = 4
_GRACE_SECONDS = 5.0
#: What a broken connection says; any other error is one that the backend answers with.
_BROKEN = (
    "connection",
    "timed out",
    "timeout",
    "broken pipe",
    "socket",
    "nccl error",
    "cuda error",
)


@dataclass
class PreflightOptions:
    """The command line of `isoshard preflight`."""

    ranks: int | None = None
    backend: str = "gloo"
    device: str | None = None
    json_file: Path | None = None
    deadline: float = 60.0
    dtypes: list[str] = field(default_factory=lambda: list(DTYPES))
    strided: bool = True

    def validate(self) -> None:
        """Raises UsageError for what cannot be meant."""
        if self.ranks is not None and self.ranks < 2:
            raise UsageError(f"--ranks must be 2 or more, got {self.ranks}.")
        unknown = [name for name in self.dtypes if name not in DTYPES]
        if unknown or not self.dtypes:
            raise UsageError(f"--dtypes must be some of {', '.join(DTYPES)}, got {unknown}.")
        if not self.deadline > 0:
            raise UsageError(f"--deadline must be seconds above 0, got {self.deadline:g}.")
        name = self.backend.split(":")[-1]
        if not dist.is_available() or not dist.is_backend_available(name):
            raise RunError(f"The backend must be in this torch, got {self.backend}.")

    def device_of(self, local_rank: int) -> torch.device:
        """Where a rank's tensors lie."""
        if self.device is not None:
            return torch.device(self.device)
        if "nccl" not in self.backend:
            return torch.device("cpu")
        if torch.cuda.device_count() <= local_rank:
            raise RunError(
                f"Every rank of {self.backend} must have a GPU of its own, got "
                f"{torch.cuda.device_count()} for local rank {local_rank}."
            )
        return torch.device("cuda", local_rank)


def preflight(options: PreflightOptions, before: Callable[[int], None] | None = None) -> int:
    """Tries everything; prints a table; returns 0, 1 (something is wrong) or 4 (ranks died).

    In a process of a launcher this is one rank. `before(rank)` is called in each rank that is
    started here.
    """
    options.validate()
    if options.ranks is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _be_rank(options, None)
    return _start_ranks(options, options.ranks or 2, before)


# -- one rank ------------------------------------------------------------------------------------


class Watchdog:
    """Ends this process when a case takes too long; says where it is in a file, if it has one."""

    def __init__(self, deadline: float, rank: int, file: int | None) -> None:
        self.deadline, self.rank, self.file = deadline, rank, file
        self._case, self._since = "", time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, case: str) -> None:
        """The deadline counts from here."""
        self._case, self._since = case, time.monotonic()
        if self.file is not None:
            text = case.encode()
            os.pwrite(self.file, text.ljust(200), 0)

    def _watch(self) -> None:
        while True:
            time.sleep(min(0.2, self.deadline / 4))
            case, since = self._case, self._since
            if time.monotonic() - since > self.deadline:
                sys.stdout.flush()
                text = f"isoshard: rank {self.rank} hangs in {case} for {self.deadline:g} s\n"
                os.write(2, text.encode())
                os._exit(DIED)


def _be_rank(options: PreflightOptions, file: int | None) -> int:
    """Runs all cases on this rank; all ranks return the same code."""
    torch.set_num_threads(1)
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=60 + options.deadline)))
    store.set_timeout(timedelta(seconds=10 * options.deadline + 60))
    device = options.device_of(int(os.environ.get("LOCAL_RANK", rank)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    watchdog = Watchdog(options.deadline, rank, file)
    watchdog.begin("init_process_group")
    dist.init_process_group(
        options.backend,
        store=PrefixStore("backend", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=2 * options.deadline),
    )
    started = time.monotonic()
    kinds = groups_of(size)
    handles = _make_groups(kinds)
    mine = PrefixStore("preflight", store)
    own = Results()
    for case in cases(options.dtypes, list(kinds), strided=options.strided):
        members = next((m for m in kinds[case.group] if rank in m), None)
        if members is None:
            continue
        watchdog.begin(str(case))
        place = Place(members, handles[tuple(members)], device, rank, mine)
        _try(case, place, own)
    watchdog.begin("the end")
    mine.set(f"results/{rank}", own.to_text())
    watchdog.deadline = 10 * options.deadline + 60  # ranks may end far apart
    code = _conclude(options, mine, size, time.monotonic() - started) if rank == 0 else 0
    code = int(mine.get("code")) if rank else code
    mine.add("left", 1)
    end = time.monotonic() + _GRACE_SECONDS
    while rank == 0 and mine.add("left", 0) < size and time.monotonic() < end:
        time.sleep(0.01)  # the store may live in this process
    dist.destroy_process_group()
    return code


def _try(case: Case, place: Place, own: Results) -> None:
    if not is_exact(case, place.n):
        own.not_tried(case)
        return
    try:
        problem = perform(case, place)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if any(word in text.lower() for word in _BROKEN):
            raise RunError(f"Rank {place.rank} lost the others in {case}: {text}") from error
        own.raised(case, text)
    else:
        own.done(case, problem)


def groups_of(size: int) -> dict[str, list[list[int]]]:
    """Kinds of groups: the world, every second rank, and pairs of neighbors."""
    everyone = list(range(size))
    kinds = {"world": [everyone]}
    if size >= 4:
        kinds["halves"] = [everyone[0::2], everyone[1::2]]
    if size >= 3:
        kinds["pairs"] = [everyone[i : i + 2] for i in range(0, size - 1, 2)]
    return kinds


def _make_groups(kinds: dict[str, list[list[int]]]) -> dict[tuple[int, ...], Any]:
    """All ranks make all groups, in the same order."""
    return {
        tuple(members): dist.group.WORLD if kind == "world" else dist.new_group(members)
        for kind, groups in kinds.items()
        for members in groups
    }


def _conclude(options: PreflightOptions, store: Any, size: int, seconds: float) -> int:
    """Rank 0 puts the ranks' results together."""
    by_rank = [Results.from_text(store.get(f"results/{rank}")) for rank in range(size)]
    head = f"{options.backend}, {size} ranks, torch {torch.__version__}, {seconds:.1f} s"
    code = code_of(by_rank)
    print(text_of(by_rank, options.dtypes, head), flush=True)
    if options.json_file is not None:
        content = {
            "schema": 1,
            "backend": options.backend,
            "ranks": size,
            "torch": torch.__version__,
            "seconds": round(seconds, 3),
            "exit_code": code,
            "cells": to_json(by_rank),
        }
        options.json_file.write_text(json.dumps(content, indent=1) + "\n")
    store.set("code", str(code))
    return code


# -- starting ranks ------------------------------------------------------------------------------


def _start_ranks(options: PreflightOptions, size: int, before: Callable[[int], None] | None) -> int:
    from ._fork import environment_of, free_port, one_thread
    from ._launch import Launch

    one_thread()
    launch, port = Launch("", size, ""), free_port()
    with tempfile.TemporaryDirectory(prefix="isoshard-preflight-") as folder:
        files = [Path(folder) / f"rank{rank}" for rank in range(size)]
        sys.stdout.flush()
        sys.stderr.flush()
        pids = []
        for rank, path in enumerate(files):
            path.touch()
            pid = os.fork()
            if pid == 0:
                os.environ.update(environment_of(launch, rank, port))
                _live(options, path, rank, before)
            pids.append(pid)
        codes = _wait(pids, files, 2 * options.deadline + 60)
        died = [r for r, code in enumerate(codes) if code not in (0, 1)]
        if not died and len(set(codes)) == 1:
            return codes[0]
        for rank, code in enumerate(codes):
            what = f"died by signal {-code}" if code < 0 else f"ended with code {code}"
            last = files[rank].read_text().strip()
            print(f"isoshard: rank {rank} {what}; its last case was {last}", file=sys.stderr)
        return DIED


def _live(
    options: PreflightOptions, path: Path, rank: int, before: Callable[[int], None] | None
) -> None:
    """The whole life of a forked rank."""
    code = DIED
    try:
        die_with_parent()
        if before is not None:
            before(rank)
        code = _be_rank(options, os.open(path, os.O_WRONLY))
    except BaseException as error:  # its own text says enough: 1 would say that something is wrong
        print(f"isoshard: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], files: list[Path], limit: float) -> list[int]:
    """The exit codes. A rank that died ends the others, as does a time without any new case."""
    codes: list[int | None] = [None] * len(pids)
    since = failed_at = None
    while None in codes:
        for i, pid in enumerate(pids):
            if codes[i] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                codes[i] = os.waitstatus_to_exitcode(status) if done else None
        now = time.time()
        newest = max(path.stat().st_mtime for path in files)
        if failed_at is None and any(code not in (0, 1, None) for code in codes):
            failed_at = now
        since = max(newest, since or now)
        if now - since > limit or (failed_at is not None and now - failed_at > _GRACE_SECONDS):
            running = [i for i, code in enumerate(codes) if code is None]
            end_processes([pids[i] for i in running])
            for i in running:
                codes[i] = os.waitstatus_to_exitcode(os.waitpid(pids[i], 0)[1])
        time.sleep(0.01)
    return [code if code is not None else -int(signal.SIGKILL) for code in codes]
