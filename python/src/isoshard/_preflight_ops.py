# SPDX-License-Identifier: Apache-2.0
"""The collectives of `isoshard preflight`: each is called on integers whose result is exact.

A case is an operation on one dtype, reduction, group and size, in one way of calling it. Every
rank computes what it must get by itself; nothing is compared over the backend that is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
#: Up to here every integer is a number of the dtype.
_LARGEST = {"fp16": 2048, "bf16": 256, "int8": 127, "uint8": 255, "bool": 1}
_LARGEST_OF_OTHERS = 1 << 20
_UNSIGNED = ("uint8", "bool")
_BITWISE = ("band", "bor", "bxor")
REDUCTIONS = ("sum", "avg", "min", "max", "product", *_BITWISE)
_REDUCE_OPS = {name: name.upper() for name in REDUCTIONS}

#: Numbers before and behind each result, which must stay as they are.
_GUARD, _GUARD_VALUE = 8, 77

PLAIN, ASYNC, STRIDED, UNEVEN = "plain", "async", "strided", "uneven"


@dataclass(frozen=True)
class Case:
    """What is called; `group` is a kind of group (world, halves, pairs, every second)."""

    op: str
    dtype: str
    reduction: str
    group: str
    size: int
    way: str = PLAIN

    def __str__(self) -> str:
        parts = [self.op, self.reduction, self.dtype, f"size {self.size}", f"over {self.group}"]
        if self.way != PLAIN:
            parts.append(self.way)
        return " ".join(part for part in parts if part)


@dataclass
class Place:
    """Where a rank calls: its group, and its place in it."""

    members: list[int]
    group: Any
    device: torch.device
    rank: int
    store: Any = None

    @property
    def n(self) -> int:
        """How many ranks the group has."""
        return len(self.members)

    @property
    def me(self) -> int:
        """This rank's number in the group."""
        return self.members.index(self.rank)

    @property
    def root(self) -> int:
        """The rank that roots of a collective are taken to be: the last one."""
        return self.members[-1]


@dataclass
class Call:
    """The buffers of one case on one rank, and what they must hold afterwards."""

    case: Case
    place: Place
    expected: list[tuple[str, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    guards: list[torch.Tensor] = field(default_factory=list)
    started: list[Any] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return DTYPES[self.case.dtype]

    def cast(self, numbers: torch.Tensor) -> torch.Tensor:
        """Integers in the dtype of the case, on its device."""
        return numbers.to(self.dtype).to(self.place.device)

    def values(self, member: int, count: int, salt: int = 0) -> torch.Tensor:
        """What a member of the group gives, as int64."""
        return _numbers(self.case, self.place.n, member, count, salt)

    def reduced(self, count: int, salt: int = 0) -> torch.Tensor:
        """What a reduction over the group gives, as int64."""
        parts = torch.stack([self.values(m, count, salt) for m in range(self.place.n)])
        return _reduce(self.case.reduction, parts)

    def out(self, count: int, start: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor for a result between guards; `start` is what it holds first."""
        strided = self.case.way == STRIDED
        shape = (count + 2 * _GUARD, 2) if strided else (count + 2 * _GUARD,)
        whole = torch.full(shape, _GUARD_VALUE, dtype=torch.int64)
        inner = whole[_GUARD : _GUARD + count, 0] if strided else whole[_GUARD : _GUARD + count]
        inner.copy_(torch.zeros_like(inner) if start is None else start)
        buffer = self.cast(whole)
        self.guards.append(buffer)
        return buffer[_GUARD : _GUARD + count, 0] if strided else buffer[_GUARD : _GUARD + count]

    def given(self, numbers: torch.Tensor) -> torch.Tensor:
        """An input, which must stay as it is."""
        tensor = self.out(numbers.numel(), numbers)
        self.must("input", numbers, tensor)
        return tensor

    def must(self, what: str, numbers: torch.Tensor, tensor: torch.Tensor) -> None:
        """What a tensor must hold in the end."""
        self.expected.append((what, numbers, tensor))

    def keywords(self) -> dict[str, Any]:
        """The arguments that every operation takes."""
        return {"group": self.place.group, "async_op": self.case.way == ASYNC}

    def reduce_op(self) -> Any:
        """The reduction as torch has it."""
        return getattr(dist.ReduceOp, _REDUCE_OPS[self.case.reduction])

    def splits(self, member: int) -> list[int]:
        """How many numbers a member sends to each one: some none, and none the same."""
        if self.case.way != UNEVEN:
            return [self.case.size] * self.place.n
        return [(member + 2 * other) % 4 * self.case.size for other in range(self.place.n)]


def largest(dtype: str) -> int:
    """Up to here every integer is a number of the dtype."""
    return _LARGEST.get(dtype, _LARGEST_OF_OTHERS)


def _range_of(case: Case, n: int) -> int:
    """How large the numbers of a rank may be, so that every result is exact; 0: no such numbers."""
    limit = largest(case.dtype)
    if case.reduction == "sum":
        return limit // n
    if case.reduction == "avg":
        return limit // (n * n)
    return min(limit, 127) if case.reduction in _BITWISE else limit


def is_exact(case: Case, n: int) -> bool:
    """Whether there are numbers whose result is exact and not always zero."""
    return _range_of(case, n) >= 1


def _numbers(case: Case, n: int, member: int, count: int, salt: int) -> torch.Tensor:
    i = torch.arange(count, dtype=torch.int64)
    if case.reduction == "product":  # at most three factors of 2
        return 1 + ((i + member + salt) % n < 3).to(torch.int64)
    top = _range_of(case, n)
    mixed = (i * 2654435761 + (member + 1) * 97531 + (salt + 1) * 1013) // 128 % (top + 1)
    if case.dtype not in _UNSIGNED and case.reduction not in _BITWISE:
        mixed = torch.where(i % 3 == 1, -mixed, mixed)
    return mixed * n if case.reduction == "avg" else mixed


def _reduce(reduction: str, parts: torch.Tensor) -> torch.Tensor:
    if reduction == "sum":
        return parts.sum(0)
    if reduction == "avg":
        return parts.sum(0) // len(parts)
    if reduction in ("min", "max"):
        return parts.amin(0) if reduction == "min" else parts.amax(0)
    result = parts[0]
    for part in parts[1:]:
        if reduction == "product":
            result = result * part
        elif reduction == "band":
            result = result & part
        else:
            result = result | part if reduction == "bor" else result ^ part
    return result


# -- operations ----------------------------------------------------------------------------------


def _all_reduce(call: Call) -> None:
    for salt in range(3 if call.case.way == ASYNC else 1):  # several may be in flight
        tensor = call.out(call.case.size, call.values(call.place.me, call.case.size, salt))
        call.must("result", call.reduced(call.case.size, salt), tensor)
        call.started.append(dist.all_reduce(tensor, op=call.reduce_op(), **call.keywords()))


def _reduce_to_root(call: Call) -> None:
    size, place = call.case.size, call.place
    tensor = call.out(size, call.values(place.me, size))
    if place.rank == place.root:
        call.must("result", call.reduced(size), tensor)
    call.started.append(dist.reduce(tensor, dst=place.root, op=call.reduce_op(), **call.keywords()))


def _reduce_scatter(call: Call) -> None:
    size, n = call.case.size, call.place.n
    parts = call.values(call.place.me, size * n).chunk(n) if size else [torch.zeros(0)] * n
    inputs = [call.given(part.to(torch.int64)) for part in parts]
    output = call.out(size)
    call.must("result", _own_part(call, call.reduced(size * n)), output)
    call.started.append(dist.reduce_scatter(output, inputs, op=call.reduce_op(), **call.keywords()))


def _reduce_scatter_tensor(call: Call) -> None:
    size, n = call.case.size, call.place.n
    given = call.given(call.values(call.place.me, size * n))
    output = call.out(size)
    call.must("result", _own_part(call, call.reduced(size * n)), output)
    call.started.append(
        dist.reduce_scatter_tensor(output, given, op=call.reduce_op(), **call.keywords())
    )


def _own_part(call: Call, whole: torch.Tensor) -> torch.Tensor:
    size = call.case.size
    return whole[call.place.me * size : (call.place.me + 1) * size]


def _all_gather(call: Call) -> None:
    size = call.case.size
    outputs = [call.out(size) for _ in call.place.members]
    for member, output in enumerate(outputs):
        call.must(f"part {member}", call.values(member, size), output)
    given = call.given(call.values(call.place.me, size))
    call.started.append(dist.all_gather(outputs, given, **call.keywords()))


def _all_gather_into_tensor(call: Call) -> None:
    size, n = call.case.size, call.place.n
    output = call.out(size * n)
    call.must("result", torch.cat([call.values(m, size) for m in range(n)]), output)
    given = call.given(call.values(call.place.me, size))
    call.started.append(dist.all_gather_into_tensor(output, given, **call.keywords()))


def _sent(call: Call, member: int, to: int) -> torch.Tensor:
    """What one member sends to another one in an all-to-all."""
    return call.values(member, call.splits(member)[to], salt=to)


def _all_to_all(call: Call) -> None:
    place = call.place
    inputs = [call.given(_sent(call, place.me, to)) for to in range(place.n)]
    outputs = [call.out(call.splits(m)[place.me]) for m in range(place.n)]
    for member, output in enumerate(outputs):
        call.must(f"part {member}", _sent(call, member, place.me), output)
    call.started.append(dist.all_to_all(outputs, inputs, **call.keywords()))


def _all_to_all_single(call: Call) -> None:
    place = call.place
    given = call.given(torch.cat([_sent(call, place.me, to) for to in range(place.n)]))
    numbers = torch.cat([_sent(call, m, place.me) for m in range(place.n)])
    output = call.out(numbers.numel())
    call.must("result", numbers, output)
    splits: dict[str, Any] = {}
    if call.case.way == UNEVEN:
        splits["output_split_sizes"] = [call.splits(m)[place.me] for m in range(place.n)]
        splits["input_split_sizes"] = call.splits(place.me)
    call.started.append(dist.all_to_all_single(output, given, **splits, **call.keywords()))


def _broadcast(call: Call) -> None:
    place, size = call.place, call.case.size
    numbers = call.values(place.n - 1, size)
    tensor = call.out(size, numbers if place.rank == place.root else None)
    call.must("result", numbers, tensor)
    call.started.append(dist.broadcast(tensor, src=place.root, **call.keywords()))


def _scatter(call: Call) -> None:
    place, size = call.place, call.case.size
    inputs = None
    if place.rank == place.root:
        inputs = [call.given(call.values(m, size)) for m in range(place.n)]
    output = call.out(size)
    call.must("result", call.values(place.me, size), output)
    call.started.append(dist.scatter(output, inputs, src=place.root, **call.keywords()))


def _gather(call: Call) -> None:
    place, size = call.place, call.case.size
    outputs = None
    if place.rank == place.root:
        outputs = [call.out(size) for _ in place.members]
        for member, output in enumerate(outputs):
            call.must(f"part {member}", call.values(member, size), output)
    given = call.given(call.values(place.me, size))
    call.started.append(dist.gather(given, outputs, dst=place.root, **call.keywords()))


def _send_recv(call: Call) -> None:
    """Around a ring: to the next member, from the one before."""
    place, size = call.place, call.case.size
    following, before = (place.me + 1) % place.n, (place.me - 1) % place.n
    given = call.given(call.values(place.me, size))
    output = call.out(size)
    call.must("result", call.values(before, size), output)
    to, source = place.members[following], place.members[before]
    if call.case.way == ASYNC:
        operations = [
            dist.P2POp(dist.isend, given, to, place.group),
            dist.P2POp(dist.irecv, output, source, place.group),
        ]
        call.started += dist.batch_isend_irecv(operations)
    elif place.me == 0:
        dist.send(given, to, group=place.group)
        dist.recv(output, source, group=place.group)
    else:
        dist.recv(output, source, group=place.group)
        dist.send(given, to, group=place.group)


def _barrier(call: Call) -> None:
    """Nobody leaves before the last one has come, which comes late."""
    import time

    place, key = call.place, f"barrier/{call.case}/{call.place.members}"
    if place.rank == place.root:
        time.sleep(0.05)
    place.store.add(key, 1)
    work = dist.barrier(**call.keywords())
    if work is not None:
        work.wait()
    seen = torch.tensor([place.store.add(key, 0)])
    call.must("ranks that had come", torch.tensor([place.n]), seen)


OPERATIONS: dict[str, Callable[[Call], None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce_to_root,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "send_recv": _send_recv,
    "barrier": _barrier,
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
_UNEVEN_OPS = ("all_to_all", "all_to_all_single")
_SIZES, _LARGE = (1, 7, 0, 1003), 262147


def cases(dtypes: list[str], groups: list[str], *, strided: bool = True) -> list[Case]:
    """All cases in the order in which every rank makes them; `strided`: those of strided tensors
    as well.
    """
    result = []
    for op in OPERATIONS:
        for reduction in REDUCTIONS if op in REDUCING else ("",):
            for dtype in dtypes:
                if _makes_sense(op, reduction, dtype):
                    result += _ways(op, dtype, reduction, groups)
    return [case for case in result if strided or case.way != STRIDED]


def _makes_sense(op: str, reduction: str, dtype: str) -> bool:
    if op == "barrier":
        return dtype == "fp32"
    is_float = DTYPES[dtype].is_floating_point
    if reduction in _BITWISE:
        return not is_float
    if reduction == "avg":
        return is_float
    return dtype != "bool" or reduction in ("", "min", "max")


def _ways(op: str, dtype: str, reduction: str, groups: list[str]) -> list[Case]:
    if op == "barrier":
        return [Case(op, dtype, "", g, 0, way) for g in groups for way in (PLAIN, ASYNC)]
    result = []
    for group in groups:
        result += [Case(op, dtype, reduction, group, size) for size in _SIZES]
        result.append(Case(op, dtype, reduction, group, 7, ASYNC))
        if op in _UNEVEN_OPS:
            result.append(Case(op, dtype, reduction, group, 5, UNEVEN))
    if reduction in ("", "sum"):
        result.append(Case(op, dtype, reduction, groups[0], 7, STRIDED))
        result.append(Case(op, dtype, reduction, groups[0], _LARGE))
    return result


# -- checking ------------------------------------------------------------------------------------


def perform(case: Case, place: Place) -> str:
    """Calls a case; what is wrong with the result, or an empty text. Raises what torch raises."""
    call = Call(case, place)
    OPERATIONS[case.op](call)
    for work in reversed(call.started):
        if work is not None:
            work.wait()
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    for what, numbers, tensor in call.expected:
        problem = _problem_of(what, numbers, tensor, case, place.n)
        if problem:
            return problem
    for buffer in call.guards:
        whole = call.cast(torch.full(buffer.shape, _GUARD_VALUE, dtype=torch.int64))
        if not torch.equal(buffer[:_GUARD], whole[:_GUARD]):
            return "memory before the tensor was written to"
        if not torch.equal(buffer[-_GUARD:], whole[-_GUARD:]):
            return "memory behind the tensor was written to"
        if buffer.ndim > 1 and not torch.equal(buffer[:, 1], whole[:, 1]):
            return "memory between the elements of a strided tensor was written to"
    return ""


def _problem_of(what: str, numbers: torch.Tensor, tensor: torch.Tensor, case: Case, n: int) -> str:
    got = tensor.detach().cpu()
    expected = numbers.to(got.dtype)
    if got.shape != expected.shape:
        return f"{what} must have shape {list(expected.shape)}, got {list(got.shape)}"
    wrong = got != expected
    if case.reduction == "avg" and n & (n - 1):  # a backend may multiply by 1/n, which is rounded
        eps = torch.finfo(got.dtype).eps
        wrong = ~((got.double() - numbers.double()).abs() <= n * eps * numbers.double().abs())
    count = int(wrong.sum())
    if not count:
        return ""
    first = int(wrong.nonzero()[0, 0])
    return (
        f"{what}: element {first} must be {_text(expected[first])}, got {_text(got[first])} "
        f"({count} of {got.numel()} are wrong)"
    )


def _text(value: torch.Tensor) -> str:
    number = value.item()
    return f"{number:g}" if isinstance(number, float) else str(number)
