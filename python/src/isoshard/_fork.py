# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a script by fork, from a process that has imported torch.

The process sets one thread before any operation (a child of a process that ran one with several
threads hangs in OpenMP) and never touches a GPU.
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ._auto import VARIABLE, AutoConfig, AutoRecorder, enter_precision, run_script
from ._launch import Launch
from ._processes import die_with_parent, end_processes, no_collections

#: Packages that may be imported before the fork. Others may start threads or look for devices.
_PRELOADED = {"torch", "numpy", "transformers", "accelerate", "peft", "safetensors", "tokenizers"}
_renews = False  # whether forked processes renew their threads
#: What DDP, FSDP2, DTensor and optimizers import when they are first used.
_ALWAYS = ("torch._dynamo", "torch.distributed.device_mesh")
_MODULES = "modules.json"
_GRACE_SECONDS = 5.0
_STACK_SECONDS = 1.0


@dataclass
class World:
    """The running ranks of one launch."""

    logs: list[Path]
    pids: list[int]
    codes: list[int | None] = field(default_factory=list)
    port: int = 0  # MASTER_PORT of its ranks
    failed_first: int | None = None

    def __post_init__(self) -> None:
        self.codes = [None] * len(self.pids)

    def wait(self, limit: float, tick: Callable[[], None] = lambda: None) -> list[int]:
        """Waits for all ranks, and calls `tick` meanwhile; a rank that fails ends the others."""
        end, failed_at = time.monotonic() + limit, None
        while any(code is None for code in self.codes):
            for i, pid in enumerate(self.pids):
                if self.codes[i] is None:
                    self.codes[i] = _code_of(pid)
                    if self.codes[i] and self.failed_first is None:
                        self.failed_first = i
            now = time.monotonic()
            if failed_at is None and any(code for code in self.codes):
                failed_at = now
            if now > end:
                self._leave_stacks()
                raise subprocess.TimeoutExpired("the ranks", limit)
            if failed_at is not None and now > failed_at + _GRACE_SECONDS:
                self.kill()
            tick()
            time.sleep(0.005)
        sweep(self.port)
        return [code if code is not None else -1 for code in self.codes]

    def _leave_stacks(self) -> None:
        """Lets each rank that still runs write where it stands."""
        running = [i for i, code in enumerate(self.codes) if code is None]
        for i in running:
            os.kill(self.pids[i], signal.SIGUSR1)
        end = time.monotonic() + _STACK_SECONDS
        stacks = [stack_of(self.logs[i]) for i in running]
        while time.monotonic() < end and not all(p.exists() and p.stat().st_size for p in stacks):
            time.sleep(0.01)

    def kill(self) -> None:
        """Ends the ranks that still run, and what they started."""
        running = [i for i, code in enumerate(self.codes) if code is None]
        if running:
            end_processes([self.pids[i] for i in running])
        for i in running:
            try:
                self.codes[i] = os.waitstatus_to_exitcode(os.waitpid(self.pids[i], 0)[1])
            except ChildProcessError:  # an interrupted wait() had its code already
                self.codes[i] = -signal.SIGTERM
        sweep(self.port)


def stack_of(log: Path) -> Path:
    """Where a rank writes on SIGUSR1 what it does."""
    return log.with_suffix(".stack")


def sweep(port: int, folder: Path = Path("/dev/shm")) -> None:
    """Removes the shared memory of a world that has ended.

    DeepSpeed 0.19 leaves a buffer of 69 MB for each rank behind, however its ranks end.
    """
    for path in folder.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        path.unlink(missing_ok=True)


def _code_of(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done == pid else None


def one_thread() -> None:
    """Must come before the first operation of a process that forks."""
    global _renews
    torch.set_num_threads(1)
    if not _renews:
        os.register_at_fork(after_in_child=renew_threads)
        _renews = True


def renew_threads() -> None:
    """Must come before the threads of a forked process.

    torch drops the pool of the process that forked and makes a new one when it first needs it. Two
    threads that come at the same time get none and end the process ("Invalid thread pool!",
    caffe2/utils/threadpool/pthreadpool-cpp.cc), as the engine of backward and a process group do.
    """
    torch.set_num_threads(torch.get_num_threads())


def prepare(script: str | None) -> None:
    """Sets one thread and imports what the script imports of the known packages."""
    one_thread()
    with no_collections():
        for module in _ALWAYS:
            importlib.import_module(module)
        if script is not None and Path(script).exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _preload(Path(script))


def _preload(script: Path) -> None:
    try:
        tree = ast.parse(script.read_text())
    except (SyntaxError, UnicodeDecodeError):
        return  # the script itself will say so
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _try_import(alias.name, [])
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            _try_import(node.module, [alias.name for alias in node.names])


def _try_import(module: str, names: list[str]) -> None:
    if module.split(".")[0] not in _PRELOADED:
        return
    try:
        loaded = importlib.import_module(module)
        for name in names:
            getattr(loaded, name, None)
    except Exception:  # the script may guard the import; it meets the same error itself
        return


def learn(logs: Path) -> None:
    """Imports what a finished rank had imported of the known packages."""
    path = logs / _MODULES
    if not path.exists():
        return
    with warnings.catch_warnings(), no_collections():
        warnings.simplefilter("ignore")
        for name in json.loads(path.read_text()):
            if name not in sys.modules:
                _try_import(name, [])


def _tell_modules(logs: Path) -> None:
    names = [n for n in list(sys.modules) if n.split(".")[0] in _PRELOADED]
    (logs / _MODULES).write_text(json.dumps(names))


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment_of(launch: Launch, rank: int, port: int) -> dict[str, str]:
    """What the launcher would set for a rank."""
    size = str(launch.world_size)
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    return {**environment, **launch.environment}


def start(
    launch: Launch,
    config: AutoConfig,
    logs: Path,
    run: str,
    variables: Mapping[str, str] | None = None,
) -> World:
    """Forks the ranks of a launch; each writes its output to logs/rankNNNNN.log.

    `variables`: of the environment, beside the launcher's.
    """
    logs.mkdir(parents=True, exist_ok=True)
    port = free_port()
    world = World([logs / f"rank{rank:05d}.log" for rank in range(launch.world_size)], [])
    world.port = port
    sys.stdout.flush()
    sys.stderr.flush()
    for rank, log in enumerate(world.logs):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:  # the first lines of the log come from here, too
                _log_to(log)
                environment = environment_of(launch, rank, port)
                os.environ.update({**environment, **(variables or {}), "ISOSHARD_RUN_ID": run})
                os.environ.pop(VARIABLE, None)
                code = _be_rank(launch, config, log, rank)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        world.pids.append(pid)
        world.codes.append(None)
    return world


def _log_to(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)


def _be_rank(launch: Launch, config: AutoConfig, log: Path, rank: int) -> int:
    die_with_parent()
    gc.freeze()  # a collection would copy all pages of memory that the parent has filled
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.SIG_DFL)
    stack = stack_of(log).open("w")  # open as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    enter_precision(config.precision)
    recorder = AutoRecorder(config)
    if rank == 0:
        recorder.on_end = lambda: _tell_modules(log.parent)
    recorder.install()
    arguments = list(launch.arguments)
    if launch.adds_local_rank:
        arguments.insert(0, f"--local_rank={rank}")
    code = run_script(launch.script, arguments, launch.is_module)
    if code == 0 or recorder.is_done:
        recorder.finish()
        recorder.on_end()
    else:
        recorder.leave_notes()
    sys.stdout.flush()
    sys.stderr.flush()
    return 1 if recorder.has_error else code
