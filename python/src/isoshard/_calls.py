# SPDX-License-Identifier: Apache-2.0
"""The journal of a run's collectives: what each rank called, on which group, in which order.

Every call of torch.distributed on a process group is one call of an operator of the namespace
c10d, whoever makes it: Python, DDP's reducer, FSDP2, functional collectives, DTensor. A kernel in
front of these operators (dispatch key BackendSelect) notes the call and passes it on.

Not seen: what does not go through an operator of c10d, such as NCCL or MPI called directly,
kernels on symmetric memory, stores, and process groups that are written in Python.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ._safetensors import DTYPES
from ._unread import frame_of_caller, watch_unread

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Operator of c10d -> (name in the journal, the argument whose bytes count, the group's argument).
#: Of a gather that is a rank's own part, of a scatter what the rank gets, else what it gives.
_OPS: dict[str, tuple[str, int, int]] = {
    "allreduce_": ("all_reduce", 0, 1),
    "allreduce_coalesced_": ("all_reduce", 0, 1),
    "allgather_": ("all_gather", 1, 2),
    "_allgather_base_": ("all_gather", 1, 2),
    "allgather_coalesced_": ("all_gather", 1, 2),
    "allgather_into_tensor_coalesced_": ("all_gather", 1, 2),
    "reduce_scatter_": ("reduce_scatter", 1, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 2),
    "reduce_": ("reduce", 0, 1),
    "gather_": ("gather", 1, 2),
    "scatter_": ("scatter", 0, 2),
    "alltoall_": ("all_to_all", 1, 2),
    "alltoall_base_": ("all_to_all", 1, 2),
    "broadcast_": ("broadcast", 0, 1),
    "barrier": ("barrier", 0, 1),
    "monitored_barrier_": ("barrier", 0, 1),
    "send": ("send", 0, 1),
    "recv_": ("recv", 0, 1),
    "recv_any_source_": ("recv", 0, 1),
}
#: The place of the root or the other rank (in the group's own numbers) among the arguments.
_PEERS = {"broadcast_": 2, "reduce_": 3, "gather_": 3, "scatter_": 3, "send": 2, "recv_": 2}
#: Operators whose result is the tensor that they are given.
_IN_PLACE = ("allreduce_", "broadcast_")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
#: As c10d::ReduceOp counts them.
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")

#: The parts of a step. `between` is what comes before a step's first forward pass.
BETWEEN, FORWARD, BACKWARD, UPDATE = "between", "forward", "backward", "update"

_own = threading.local()  # depth: how many functions of the recorder run in this thread


def is_own() -> bool:
    """Whether a function of the recorder runs in this thread."""
    return getattr(_own, "depth", 0) > 0


@contextmanager
def unjournaled() -> Iterator[None]:
    """What runs in the block is the recorder's own, and no call of the run. Also a decorator."""
    _own.depth = getattr(_own, "depth", 0) + 1
    try:
        yield
    finally:
        _own.depth -= 1


def not_journaled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The same function, whose collectives are the recorder's own."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with unjournaled():
            return function(*args, **kwargs)

    return call


class Journal:
    """The calls of one rank since the step before; `take` hands them over at the end of a step."""

    def __init__(self) -> None:
        self.phase = BETWEEN
        self.problem = ""
        self._calls: list[dict[str, Any]] = []
        self._groups: dict[str, list[int]] = {}
        self._storages: list[tuple[dict[str, Any], Any]] = []
        self._watches: list[Any] = []

    def start(self) -> None:
        """Journals all calls from here on."""
        if self not in _journals:
            _install()
            _journals.append(self)

    def stop(self) -> None:
        """Journals no more."""
        if self in _journals:
            _journals.remove(self)
        self._calls, self._storages, self._watches = [], [], []

    def note(self, name: str, args: tuple[Any, ...]) -> None:
        """Notes a call of an operator of c10d. Calls on groups of one rank do not count."""
        op, at, group_at = _OPS[name]
        group = dist.ProcessGroup.unbox(args[group_at])
        if group.size() < 2:
            return
        if group.group_name not in self._groups:
            self._groups[group.group_name] = dist.get_process_group_ranks(group)
        ranks = self._groups[group.group_name]
        is_barrier = op == "barrier"
        tensors = [] if is_barrier else list(_tensors_of(args[at]))
        call: dict[str, Any] = {"op": op, "group": group.group_name}
        if op in REDUCING:
            kind = int(args[group_at + 1].op())
            call["reduction"] = _REDUCTIONS[kind] if kind < len(_REDUCTIONS) else str(kind)
        dtypes = {t.dtype for t in tensors}
        if dtypes:
            call["dtype"] = _dtype_of(next(iter(dtypes))) if len(dtypes) == 1 else "mixed"
        call["bytes"] = sum(t.numel() * t.element_size() for t in tensors)
        if name in _PEERS:
            call["peer"] = ranks[args[_PEERS[name]]]
        is_backward = torch._C._current_graph_task_id() != -1
        call["phase"] = BACKWARD if is_backward else self.phase
        call["at"] = caller()
        self._calls.append(call)
        if name in _IN_PLACE and len(tensors) == 1:
            self._watches.append(watch_unread(tensors[0], functools.partial(_set_unread, call)))
        if len(tensors) == 1 and tensors[0].layout == torch.strided:
            self._storages.append((call, _storage_of(tensors[0])))

    def name_tensors(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Names the calls whose tensor is one of these, by their memory.

        Several tensors in one memory have no name: a call on it may be on any of them.
        """
        if not self._storages:
            return
        names: dict[int, str] = {}
        for name, tensor in named:
            if tensor.layout == torch.strided and tensor.numel() > 0:
                key = tensor.untyped_storage()._cdata
                names[key] = "" if key in names else name
        for call, storage in self._storages:
            if names.get(storage.cdata):
                call["of"] = names[storage.cdata]

    def take(self) -> dict[str, Any]:
        """The journal of the step that ends, as a rank's file of a bundle holds it."""
        used = {call["group"] for call in self._calls}
        taken: dict[str, Any] = {
            "groups": {name: self._groups[name] for name in sorted(used)},
            "calls": self._calls,
        }
        if self.problem:
            taken["problem"] = self.problem
        self.phase, self._calls, self._storages, self._watches = BETWEEN, [], [], []
        return taken


def _set_unread(call: dict[str, Any]) -> None:
    call["unread"] = True


_journals: list[Journal] = []
_libraries: list[Any] = []
_early: list[Journal] = []


def begin_early() -> None:
    """Journals from here on for the recorder that this process is going to make."""
    if not _early and dist.is_available():
        _early.append(Journal())
        _early[0].start()


def journal_of_recorder() -> Journal:
    """A journal that runs: the one that began early, if there is one."""
    journal = _early.pop() if _early else Journal()
    if dist.is_available():
        journal.start()
    return journal


def _install() -> None:
    """Puts a kernel in front of each operator of c10d, once in a process."""
    if _libraries:
        return
    untyped: Any = torch.library
    library = untyped.Library("c10d", "IMPL")
    key = torch._C.DispatchKey.BackendSelect
    behind = torch._C._dispatch_keyset_full_after(key)
    for name in _OPS:
        operator = getattr(torch.ops.c10d, name, None)
        if operator is not None:
            kernel = _kernel_of(name, operator.default, behind)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
    _libraries.append(library)


def _kernel_of(name: str, operator: Any, behind: Any) -> Callable[..., Any]:
    # torch.compile would trace it where it breaks a graph for a collective, as in DDP's forward.
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _journals and not is_own():
            for journal in _journals:
                try:
                    journal.note(name, args)
                except Exception as error:  # the script must not fail by it; the judge is told
                    text = f"{name}: {type(error).__name__}: {error}"
                    journal.problem = " ".join(text.split())[:200]
        return operator.redispatch(keys & behind, *args, **kwargs)

    untyped: Any = torch
    made: Callable[..., Any] = untyped._disable_dynamo(kernel)
    return made


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """A tensor, or those of lists of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        yield from itertools.chain.from_iterable(map(_tensors_of, value))


def _storage_of(tensor: torch.Tensor) -> Any:
    """A weak reference: the memory may go, but no other one gets its address meanwhile."""
    from torch.multiprocessing import reductions

    untyped: Any = reductions
    return untyped.StorageWeakRef(tensor.untyped_storage())


def _dtype_of(dtype: torch.dtype) -> str:
    return DTYPES[dtype][0] if dtype in DTYPES else str(dtype).removeprefix("torch.")


def caller() -> str:
    """FILE:LINE of who called torch, for people to find it."""
    frame = frame_of_caller()
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
