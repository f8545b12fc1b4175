# SPDX-License-Identifier: Apache-2.0
"""What `isoshard preflight` found: per rank, put together, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ._preflight_ops import STRIDED, Case

_MOST_SHOWN = 20
#: what a row of the table is about, and the dtype
Cell = tuple[str, str, str]


@dataclass
class Results:
    """What one rank saw of each case, by the case's words."""

    cells: dict[str, Cell] = field(default_factory=dict)
    fine: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def _add(self, case: Case) -> str:
        way = STRIDED if case.way == STRIDED else ""
        row = f"{case.reduction} {way}".strip()
        self.cells[str(case)] = (case.op, row, case.dtype)
        return str(case)

    def done(self, case: Case, problem: str) -> None:
        """A case that ended is right if there is no problem."""
        name = self._add(case)
        if problem:
            self.wrong[name] = problem
        else:
            self.fine.append(name)

    def raised(self, case: Case, text: str) -> None:
        """A case that the backend answered with an error."""
        self.errors[self._add(case)] = text

    def not_tried(self, case: Case) -> None:
        """A case without numbers whose result is exact."""
        self.skipped.append(self._add(case))

    def to_text(self) -> str:
        """For the store."""
        return json.dumps(vars(self))

    @staticmethod
    def from_text(text: bytes | str) -> Results:
        """From the store."""
        values = json.loads(text)
        values["cells"] = {name: tuple(cell) for name, cell in values["cells"].items()}
        return Results(**values)


@dataclass
class _Case:
    """One case on all ranks that took part."""

    name: str
    cell: Cell
    ranks: list[int] = field(default_factory=list)
    wrong: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    is_skipped: bool = False

    @property
    def problem(self) -> str:
        """What is wrong, and on which rank; an error on some ranks only is wrong, too."""
        if self.wrong:
            rank = min(self.wrong)
            more = f" (and {len(self.wrong) - 1} more ranks)" if len(self.wrong) > 1 else ""
            return f"rank {rank}{more}: {self.wrong[rank]}"
        if self.errors and len(self.errors) < len(self.ranks):
            rank = min(self.errors)
            fine = min(r for r in self.ranks if r not in self.errors)
            return f"rank {rank} raised {self.errors[rank]}, and rank {fine} went on"
        return ""

    @property
    def refusal(self) -> str:
        """The backend's error, if all ranks got one."""
        return self.errors[min(self.errors)] if self.errors and not self.problem else ""


def _together(by_rank: Sequence[Results]) -> list[_Case]:
    found: dict[str, _Case] = {}
    for rank, results in enumerate(by_rank):
        for name, cell in results.cells.items():
            case = found.setdefault(name, _Case(name, cell))
            case.ranks.append(rank)
            if name in results.wrong:
                case.wrong[rank] = results.wrong[name]
            if name in results.errors:
                case.errors[rank] = results.errors[name]
            case.is_skipped = case.is_skipped or name in results.skipped
    return list(found.values())


def code_of(by_rank: Sequence[Results]) -> int:
    """0, or 1 if something is wrong, or nothing worked."""
    together = _together(by_rank)
    works = any(not c.problem and not c.refusal and not c.is_skipped for c in together)
    return 1 if not works or any(case.problem for case in together) else 0


def _cells(together: Sequence[_Case]) -> dict[Cell, list[_Case]]:
    cells: dict[Cell, list[_Case]] = {}
    for case in together:
        cells.setdefault(case.cell, []).append(case)
    return cells


def _word_of(found: Sequence[_Case] | None) -> str:
    if found is None:
        return "."
    if any(case.problem for case in found):
        return "WRONG"
    tried = [case for case in found if not case.is_skipped]
    refused = [case for case in tried if case.refusal]
    if not tried:
        return "?"
    if len(refused) == len(tried):
        return "-"
    return "ok*" if refused else "ok"


def text_of(by_rank: Sequence[Results], dtypes: Sequence[str], head: str) -> str:
    """The table, then what is wrong, then what is not supported."""
    together = _together(by_rank)
    cells = _cells(together)
    rows = list(dict.fromkeys((op, reduction) for op, reduction, _ in cells))
    width = max((len(f"{op} {reduction}") for op, reduction in rows), default=0) + 2
    lines = [f"preflight: {head}", ""]
    lines.append(" " * width + "".join(f"{name:>7}" for name in dtypes))
    for op, reduction in rows:
        words = [_word_of(cells.get((op, reduction, dtype))) for dtype in dtypes]
        lines.append(f"{op} {reduction}".ljust(width) + "".join(f"{word:>7}" for word in words))
    lines += [
        "",
        "ok: all right    ok*: right, and some ways are not supported    -: not supported",
        ".: has no meaning    ?: no exact numbers for so many ranks    WRONG: see below",
    ]
    wrong = [case for case in together if case.problem]
    lines += _wrong_lines(wrong) + _refused_lines(together)
    tried = sum(not case.is_skipped for case in together)
    refused = sum(bool(case.refusal) for case in together)
    lines += ["", f"{tried} cases: {tried - refused - len(wrong)} right, {refused} not supported, "]
    lines[-1] += f"{len(wrong)} wrong"
    return "\n".join(lines)


def _wrong_lines(wrong: Sequence[_Case]) -> list[str]:
    lines = [f"  {case.name}: {case.problem}" for case in wrong[:_MOST_SHOWN]]
    if len(wrong) > _MOST_SHOWN:
        lines.append(f"  and {len(wrong) - _MOST_SHOWN} more (--json FILE has all)")
    return ["", "wrong:", *lines] if lines else []


def _refused_lines(together: Sequence[_Case]) -> list[str]:
    """Errors, each with what it was the answer to."""
    by_error: dict[str, list[_Case]] = {}
    for case in together:
        if case.refusal:
            by_error.setdefault(case.refusal, []).append(case)
    lines = []
    for error, found in by_error.items():
        ops = list(dict.fromkeys(f"{c.cell[0]} {c.cell[1]}".strip() for c in found))
        dtypes = list(dict.fromkeys(c.cell[2] for c in found))
        lines.append(f"  {error}")
        lines.append(f"      {len(found)} cases, first {found[0].name}")
        lines.append(f"      {', '.join(ops)} in {', '.join(dtypes)}")
    return ["", "not supported, in the backend's own words:", *lines] if lines else []


def to_json(by_rank: Sequence[Results]) -> list[dict[str, Any]]:
    """All cells with their cases."""
    result = []
    for (op, reduction, dtype), found in _cells(_together(by_rank)).items():
        result.append(
            {
                "op": op,
                "row": reduction,
                "dtype": dtype,
                "result": _word_of(found),
                "right": sum(not (c.problem or c.refusal or c.is_skipped) for c in found),
                "wrong": [{"case": c.name, "problem": c.problem} for c in found if c.problem],
                "not_supported": [{"case": c.name, "error": c.refusal} for c in found if c.refusal],
                "not_tried": [c.name for c in found if c.is_skipped],
            }
        )
    return result
