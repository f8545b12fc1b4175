# SPDX-License-Identifier: Apache-2.0
"""Kept worker processes: a server imports torch once and forks ranks, which wait for cases.

`serve` is the server. Client and server exchange pickles over pipes.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import IO, Any

from . import _extensions
from ._environment import caches_of
from ._fork import sweep
from ._processes import die_with_parent
from .errors import RunError, UsageError

_TIMEOUT = 600.0
#: Ranks with more threads are started anew: frameworks keep the process groups of each case.
_MOST_THREADS = 64


def _send(file: IO[bytes], value: bytes) -> None:
    file.write(struct.pack("<Q", len(value)) + value)
    file.flush()


def _receive(file: IO[bytes]) -> bytes:
    head = file.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    value = file.read(size)
    if len(value) < size:
        raise EOFError
    return value


# -- client --------------------------------------------------------------------------------------


class Workers:
    """A server and its kept ranks. `close` ends them; so does the end of this process.

    Args:
        preload: modules that the server imports before it forks ranks.
        timeout: seconds that a rank may take for a case.
        environment: variables of the server beside those of this process.
        precision: "float64": all processes compute in float64.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = (),
        timeout: float = _TIMEOUT,
        environment: Mapping[str, str] | None = None,
        precision: str = "native",
    ) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._arguments = [str(timeout), precision, *preload]
        self._environment = dict(environment or {})
        self._in_float64: Workers | None = None
        self._caches: tempfile.TemporaryDirectory[str] | None = None

    def in_float64(self) -> Workers:
        """Workers like these that compute in float64. They are kept and end with these."""
        if self._in_float64 is None:
            timeout, _, *preload = self._arguments
            self._in_float64 = Workers(
                preload=preload,
                timeout=float(timeout),
                environment=self._environment,
                precision="float64",
            )
        return self._in_float64

    def _start(self) -> subprocess.Popen[bytes]:
        self._caches = tempfile.TemporaryDirectory(prefix="isoshard-caches-")
        caches = caches_of(Path(self._caches.name))
        _extensions.free(caches)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **caches, **self._environment}
        program = "from isoshard._workers import serve; import sys; serve(sys.argv[1:])"
        server = subprocess.Popen(
            [sys.executable, "-c", program, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        atexit.register(self.close)
        return server

    def run(self, case: Any, directory: str, *, reference_only: bool = False) -> None:
        """Makes DIRECTORY/reference and DIRECTORY/run; raises RunError with what went wrong."""
        if self._server is None or self._server.poll() is not None:
            self._server = self._start()
        stdin, stdout = self._server.stdin, self._server.stdout
        assert stdin is not None and stdout is not None
        paths = [p for p in sys.path if os.path.isdir(p or ".")]
        job = pickle.dumps((paths, _dumps(case), directory, reference_only))
        try:
            _send(stdin, job)
            error = pickle.loads(_receive(stdout))
        except (EOFError, BrokenPipeError):
            self.close()
            raise RunError("The worker processes of isoshard.check ended unexpectedly.") from None
        except BaseException:  # Ctrl-C, a test's timeout: the next call would read this answer
            self.close(at_once=True)
            raise
        if error is not None:
            raise RunError(error)

    def close(self, *, at_once: bool = False) -> None:
        """Ends the server and its ranks; `at_once`: also in the middle of a case."""
        if self._in_float64 is not None:
            self._in_float64.close(at_once=at_once)
        server, self._server = self._server, None
        if server is None:
            return
        if at_once:
            server.kill()
        with contextlib.suppress(OSError):
            if server.stdin is not None:
                server.stdin.close()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
        if self._caches is not None:
            with contextlib.suppress(OSError):
                self._caches.cleanup()


def _dumps(case: Any) -> bytes:
    if importlib.util.find_spec("cloudpickle") is not None:
        return bytes(importlib.import_module("cloudpickle").dumps(case))
    try:
        return pickle.dumps(case)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            "build, parallelize, optimizer and loss must be functions at the top level of a "
            f"module, because worker processes call them, got one that cannot be sent ({error}). "
            "Move them there, or install cloudpickle."
        ) from None


# -- server --------------------------------------------------------------------------------------


@dataclass
class _Rank:
    pid: int
    to: IO[bytes]
    back: IO[bytes]


class _Pool:
    """Ranks of one world size; size 1 makes references and has no process group."""

    def __init__(self, size: int) -> None:
        from ._fork import free_port

        self.ranks: list[_Rank] = []
        port = self.port = free_port()
        for rank in range(size):
            down, up = os.pipe(), os.pipe()
            # Ctrl-C reaches all processes of a terminal, and Python may swallow it where it comes
            # in the middle of a fork; a rank that it does not end would wait for ever.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            if pid == 0:
                for other in self.ranks:  # so that a dead rank is seen
                    other.to.close()
                    other.back.close()
                os.close(down[1])
                os.close(up[0])
                _be_worker(rank, size, port, os.fdopen(down[0], "rb"), os.fdopen(up[1], "wb"))
            os.close(down[0])
            os.close(up[1])
            self.ranks.append(_Rank(pid, os.fdopen(down[1], "wb"), os.fdopen(up[0], "rb")))

    def is_whole(self) -> bool:
        """Whether all ranks are still there: one may have been ended while it waited."""
        return bool(self.ranks) and all(_lives(rank.pid) for rank in self.ranks)

    def start(self, job: bytes) -> None:
        for rank in self.ranks:
            _send(rank.to, job)

    def wait(self, timeout: float) -> list[str]:
        """The errors of the ranks. After one the pool is closed: others may hang.

        It is closed, too, where process groups of earlier cases have piled up.
        """
        errors: list[str] = []
        is_worn = False
        waiting = dict(enumerate(self.ranks))
        while waiting:
            limit = 5.0 if errors else timeout
            ready, _, _ = select([r.back for r in waiting.values()], [], [], limit)
            if not ready:
                if not errors:
                    errors.append(f"The ranks {sorted(waiting)} did not end in {limit:.0f} s.")
                break
            for number, rank in list(waiting.items()):
                if rank.back not in ready:
                    continue
                del waiting[number]
                try:
                    error, threads = pickle.loads(_receive(rank.back))
                except EOFError:
                    error, threads = "the process ended", 0
                is_worn |= threads > _MOST_THREADS
                if error is not None:
                    errors.append(f"Rank {number} of {len(self.ranks)} failed: {error}")
        if errors or is_worn:
            self.close()
        return errors

    def close(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(rank.pid, 0)
            for file in (rank.to, rank.back):
                with contextlib.suppress(OSError):
                    file.close()
        self.ranks = []
        sweep(self.port)


def _lives(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    except ChildProcessError:
        return False


def _num_threads() -> int:
    """Each process group that a framework makes and keeps has threads that poll."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def _be_worker(rank: int, size: int, port: int, to: IO[bytes], back: IO[bytes]) -> None:
    """The whole life of a forked rank, which must not go on as a second server."""
    try:
        _work_on_jobs(rank, size, port, to, back)
    finally:
        os._exit(0)


def _work_on_jobs(rank: int, size: int, port: int, to: IO[bytes], back: IO[bytes]) -> None:
    die_with_parent()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    meshes: dict[tuple[tuple[str, int], ...], Any] = {}
    while True:
        try:
            job = _receive(to)
        except EOFError:
            return
        error = None
        try:
            _work(job, rank, size, meshes)
        except BaseException:
            error = traceback.format_exc()
        if size == 1:  # the next case's reference has none
            _end_process_groups(meshes)
        sys.stderr.flush()
        _send(back, pickle.dumps((error, _num_threads())))


def _work(job: bytes, rank: int, size: int, meshes: dict[Any, Any]) -> None:
    from . import _float64

    paths, case_bytes, directory, run = pickle.loads(job)
    sys.path[:0] = [p for p in paths if p not in sys.path]
    with _float64.leaving_notes(Path(f"{directory}.logs"), rank):
        _train(case_bytes, directory, run, rank, size, meshes)


def _train(
    case_bytes: bytes, directory: str, run: str, rank: int, size: int, meshes: dict[Any, Any]
) -> None:
    from . import _steps

    case = pickle.loads(case_bytes)
    os.environ["ISOSHARD_RUN_ID"] = run
    if size == 1 and directory.endswith("reference"):
        del os.environ["ISOSHARD_RUN_ID"]
        degrees = dict.fromkeys(case.mesh, 1)
        mesh = _mesh_of(degrees, meshes) if case.parallel_reference else None
        _steps.run_reference(case, directory, mesh)
        return
    _steps.run_parallel(case, directory, rank, _mesh_of(case.mesh, meshes))


def _mesh_of(axes: dict[str, int], meshes: dict[Any, Any]) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    key = tuple(axes.items())
    if key not in meshes:
        names, degrees = tuple(axes), tuple(axes.values())
        meshes[key] = init_device_mesh("cpu", degrees, mesh_dim_names=names)
    return meshes[key]


def _end_process_groups(meshes: dict[Any, Any]) -> None:
    import torch.distributed as dist

    meshes.clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def serve(arguments: Sequence[str] = (str(_TIMEOUT), "native")) -> None:
    """Runs the server: jobs come on stdin, answers go to stdout.

    The first argument is the timeout in seconds, the second the precision, the others are modules
    to import.
    """
    import math
    import uuid

    from ._auto import enter_precision
    from ._fork import prepare

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what tests print must not get between the pickles
    prepare(None)
    timeout = float(arguments[0])
    for module in arguments[2:]:
        importlib.import_module(module)
    enter_precision(arguments[1])
    pools: dict[int, _Pool] = {}
    while True:
        try:
            paths, case_bytes, directory, alone = pickle.loads(_receive(sys.stdin.buffer))
        except EOFError:
            break
        sys.path[:0] = [p for p in paths if p not in sys.path]
        try:
            size = math.prod(pickle.loads(case_bytes).mesh.values())
            run = uuid.uuid4().hex[:16]
            number = 0 if alone else size
            error = _run_both(pools, number, paths, case_bytes, directory, run, timeout)
        except BaseException:
            error = traceback.format_exc()
        _send(out, pickle.dumps(error))
    for pool in pools.values():
        pool.close()


def _run_both(
    pools: dict[int, _Pool],
    size: int,
    paths: list[str],
    case: bytes,
    directory: str,
    run: str,
    timeout: float,
) -> str | None:
    """The reference in its process and the run in its ranks, at the same time; with 0 no run."""
    keys = {"reference": 0, "run": size} if size else {"reference": 0}
    for key in keys.values():
        if key in pools and not pools[key].is_whole():
            pools[key].close()
        if key not in pools or not pools[key].ranks:
            pools[key] = _Pool(max(key, 1))
    try:
        for name, key in keys.items():
            pools[key].start(pickle.dumps((paths, case, f"{directory}/{name}", run)))
        errors = [e for key in keys.values() for e in pools[key].wait(timeout)]
    except BaseException:  # answers that nobody reads would be taken for the next case's
        for key in keys.values():
            pools[key].close()
        raise
    return errors[0] if errors else None
