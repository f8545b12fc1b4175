# SPDX-License-Identifier: Apache-2.0
"""The mutants of one source: small wrong changes of its expressions and statements.

A mutant is a piece of the source, by bytes, and what stands there instead. Its text takes the place
of the piece behind a switch, `(on(17) ? (wrong) : (right))`, so both must have one type: what this
file makes mostly has, and the compiler says what has not.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import pathlib
import re

from sources import cindex

ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "%": "*"}
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
LOGIC = {"&&": "||", "||": "&&"}
BITS = {"<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "|"}
ASSIGNMENTS = {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "=", "&=": "=", "^=": "="}

# Calls that change nothing that a run shows.
WITHOUT_EFFECT = {"move", "forward", "reserve", "shrink_to_fit", "clear_line"}
COMMUTATIVE = {"max", "min", "swap", "equal", "mul", "add"}
# Functions that make words for people.
WORDS = re.compile(
    r"(message|words|describe|did_you_mean|suggest|explain|hint|text|mismatch_of|complain|reason)"
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One wrong change. `begin` and `end` are bytes of the file; `name` is a tree's path."""

    name: str
    line: int
    last_line: int
    begin: int
    end: int
    kind: str
    before: str
    after: str
    is_statement: bool = False
    is_constexpr: bool = False
    context: str = ""  # its line, and how often the same change of such a line comes before

    @property
    def key(self) -> str:
        """The same for the same change of the same text, wherever the text has moved to."""
        text = "\0".join([self.name, self.kind, self.before, self.after, self.context])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def one_line(text: str) -> str:
    """The text without comments and line breaks: it is put into the line where it begins."""
    parts = re.split(r'("(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/)', text, flags=re.DOTALL)
    kept = [part for part in parts if not part.startswith(("//", "/*"))]
    return re.sub(r"\s*\n\s*", " ", "".join(kept)).strip()


class Finder:
    """Walks the tree of one source and collects its mutants."""

    def __init__(self, cursors: list, source: pathlib.Path, name: str, text: bytes) -> None:
        self.name = name
        self.text = text
        self.file = str(source)
        self.found: dict[tuple[int, int, str, str], Mutant] = {}
        self.macros = [
            (c.extent.start.offset, c.extent.end.offset)
            for c in cursors
            if c.kind == cindex.CursorKind.MACRO_INSTANTIATION
        ]
        self.kinds = cindex.CursorKind
        self.constexpr = False
        self.returns = None
        for child in cursors:
            if not child.kind.is_preprocessing():
                self.walk(child, None)

    # ---- text ----------------------------------------------------------------------------------

    def is_here(self, cursor) -> bool:
        """True for what stands in the source itself."""
        file = cursor.location.file
        return file is not None and file.name == self.file

    def span(self, cursor) -> tuple[int, int]:
        """The bytes of a cursor."""
        return cursor.extent.start.offset, cursor.extent.end.offset

    def raw(self, begin: int, end: int) -> str:
        """The text of these bytes."""
        return self.text[begin:end].decode("utf-8")

    def words(self, cursor) -> str:
        """The text of a cursor, in one line."""
        return one_line(self.raw(*self.span(cursor)))

    def between(self, left, right) -> str:
        """What stands between two cursors, without comments: an operator."""
        return one_line(self.raw(left.extent.end.offset, right.extent.start.offset))

    def add(self, cursor, kind: str, after: str, is_statement: bool = False) -> None:
        """Takes a mutant, unless it is part of a macro or has a directive in it."""
        begin, end = self.span(cursor)
        if end <= begin or not self.is_here(cursor):
            return
        if any(first < end and begin < last for first, last in self.macros):
            return
        before = self.words(cursor)
        if "\n#" in self.raw(begin, end) or after == before:
            return
        mutant = Mutant(
            self.name,
            cursor.extent.start.line,
            cursor.extent.end.line,
            begin,
            end,
            kind,
            before,
            after,
            is_statement,
            self.constexpr,
        )
        self.found.setdefault((begin, end, kind, after), mutant)

    # ---- the walk --------------------------------------------------------------------------------

    def walk(self, cursor, parent) -> None:
        """Mutants of a cursor and of all below it that runs."""
        kind, k = cursor.kind, self.kinds
        if kind in (k.CXX_THROW_EXPR, k.STATIC_ASSERT, k.ENUM_DECL, k.TYPE_REF, k.TEMPLATE_REF):
            return
        if kind in (k.DECL_REF_EXPR, k.OVERLOADED_DECL_REF):
            self.enumerator(cursor, parent)
            return
        if kind == k.CALL_EXPR and self.is_empty_of_effect(cursor):
            return
        if self.is_function(cursor):
            self.function(cursor)
            return
        if kind == k.LAMBDA_EXPR:
            self.closure(cursor)
            return
        visit = {
            k.BINARY_OPERATOR: self.binary,
            k.COMPOUND_ASSIGNMENT_OPERATOR: self.assignment,
            k.UNARY_OPERATOR: self.unary,
            k.INTEGER_LITERAL: self.integer,
            k.FLOATING_LITERAL: self.floating,
            k.CXX_BOOL_LITERAL_EXPR: self.boolean,
            k.IF_STMT: self.condition,
            k.CONDITIONAL_OPERATOR: self.condition,
            k.CALL_EXPR: self.call,
            k.RETURN_STMT: self.returned,
        }.get(kind)
        if visit:
            visit(cursor)
        for child in self.children_that_run(cursor):
            if self.is_statement_of(child, cursor):
                self.statement(child)
            self.walk(child, cursor)

    def is_function(self, cursor) -> bool:
        k = self.kinds
        return cursor.kind in (
            k.FUNCTION_DECL,
            k.CXX_METHOD,
            k.CONSTRUCTOR,
            k.DESTRUCTOR,
            k.CONVERSION_FUNCTION,
            k.FUNCTION_TEMPLATE,
        )

    def function(self, cursor) -> None:
        """Body and initializers of a function, unless it makes words or runs in the compiler."""
        head = self.raw(cursor.extent.start.offset, cursor.location.offset)
        if "consteval" in head or not cursor.is_definition():
            return
        if WORDS.search(cursor.spelling) and "string" in cursor.result_type.spelling:
            return
        saved = self.constexpr, self.returns
        self.constexpr = "constexpr" in head
        self.returns = cursor.result_type
        for child in cursor.get_children():
            if child.kind != self.kinds.PARM_DECL:
                self.walk(child, cursor)
        self.constexpr, self.returns = saved

    def closure(self, cursor) -> None:
        """What a lambda expression captures and does; what it returns is not known."""
        saved = self.constexpr, self.returns
        self.constexpr, self.returns = False, None
        for child in cursor.get_children():
            if child.kind != self.kinds.PARM_DECL:
                self.walk(child, cursor)
        self.constexpr, self.returns = saved

    def children_that_run(self, cursor):
        """Children without template arguments, sizes of arrays, labels and names."""
        k = self.kinds
        children = list(cursor.get_children())
        if cursor.kind == k.CASE_STMT:
            return children[1:]
        if cursor.kind in (k.VAR_DECL, k.FIELD_DECL):
            head = self.raw(cursor.extent.start.offset, cursor.location.offset)
            if "constexpr" in head:
                return []
            return [c for c in children if self.is_initializer(cursor, c)]
        if cursor.kind == k.MEMBER_REF_EXPR:
            return children[:1] if children and self.is_expression(children[0]) else []
        if cursor.kind == k.IF_STMT and re.match(r"if\s+constexpr", self.words(cursor)):
            return children[1:]
        return children

    def is_initializer(self, declaration, child) -> bool:
        """True for the value of a variable, not the size of its array or arguments of its type."""
        name_ends = declaration.location.offset + len(declaration.spelling.encode())
        begin = child.extent.start.offset
        if not child.kind.is_expression() or begin < declaration.location.offset:
            return False
        return not self.raw(name_ends, begin).strip().endswith("[")

    def is_expression(self, cursor) -> bool:
        return cursor.kind.is_expression()

    # ---- kinds of mutants ------------------------------------------------------------------------

    def is_number(self, cursor) -> bool:
        kind = cursor.type.get_canonical().kind
        t = cindex.TypeKind
        arithmetic = t.BOOL.value <= kind.value <= t.LONGDOUBLE.value
        return arithmetic or kind in (t.DEPENDENT, t.ENUM, t.UNEXPOSED)

    def is_tensor(self, cursor) -> bool:
        return bare_type(cursor) == "at::Tensor"

    def binary(self, cursor) -> None:
        left, right = two_children(cursor)
        if right is None:
            return
        operator = self.between(left, right)
        self.swap_operator(cursor, left, right, operator, self.is_number(left))

    def swap_operator(self, cursor, left, right, operator: str, takes_numbers: bool) -> None:
        """One operator in place of another one."""
        tables = [("compare", COMPARISONS), ("logic", LOGIC)]
        if takes_numbers:
            tables += [("arithmetic", ARITHMETIC), ("bits", BITS)]
        for kind, table in tables:
            if other := table.get(operator):
                self.add(cursor, kind, f"{self.words(left)} {other} {self.words(right)}")

    def assignment(self, cursor) -> None:
        left, right = two_children(cursor)
        if right is None:
            return
        operator = self.between(left, right)
        if other := ASSIGNMENTS.get(operator):
            self.add(cursor, "assignment", f"{self.words(left)} {other} {self.words(right)}")

    def unary(self, cursor) -> None:
        child = next(iter(cursor.get_children()), None)
        if child is None:
            return
        operator = self.raw(cursor.extent.start.offset, child.extent.start.offset).strip()
        if operator in ("!", "-", "~"):
            self.add(cursor, "unary", self.words(child))

    def integer(self, cursor) -> None:
        match = re.fullmatch(r"(0[xX][0-9a-fA-F']+|0|[1-9][0-9']*)([uUlLzZ]*)", self.words(cursor))
        if not match:
            return
        value = int(match[1].replace("'", ""), 0)
        self.add(cursor, "literal", f"{value + 1}{match[2]}")
        if value > 0:
            self.add(cursor, "literal", f"{value - 1}{match[2]}")

    def floating(self, cursor) -> None:
        self.add(cursor, "literal", f"{self.words(cursor)} + 1")

    def boolean(self, cursor) -> None:
        self.add(cursor, "literal", "false" if self.words(cursor) == "true" else "true")

    def condition(self, cursor) -> None:
        children = list(cursor.get_children())
        first = children[0] if children else None
        if first is None or not self.is_expression(first):
            return
        if cursor.kind == self.kinds.IF_STMT and re.match(r"if\s+constexpr", self.words(cursor)):
            return
        self.add(first, "condition", f"!({self.words(first)})")

    def returned(self, cursor) -> None:
        child = next(iter(cursor.get_children()), None)
        if child is None or self.returns is None:
            return
        kind = self.returns.get_canonical().kind
        t = cindex.TypeKind
        if kind == t.BOOL:
            self.add(child, "return", f"!({self.words(child)})")
        elif t.USHORT.value <= kind.value <= t.LONGDOUBLE.value:
            self.add(child, "return", f"({self.words(child)}) + 1")
        elif self.returns.get_canonical().spelling in ("at::Tensor", "const at::Tensor"):
            self.add(child, "return", f"({self.words(child)}).mul(2)")

    def enumerator(self, cursor, parent) -> None:
        """Another constant of an enumeration."""
        k = self.kinds
        target = cursor.referenced
        if target is None or target.kind != k.ENUM_CONSTANT_DECL or parent is None:
            return
        names = [c.spelling for c in target.semantic_parent.get_children()]
        text = self.words(cursor)
        if len(names) < 2 or not text.endswith(target.spelling):
            return
        other = names[(names.index(target.spelling) + 1) % len(names)]
        self.add(cursor, "enumerator", text[: len(text) - len(target.spelling)] + other)

    # ---- calls -----------------------------------------------------------------------------------

    def is_empty_of_effect(self, call) -> bool:
        return call.spelling in WITHOUT_EFFECT and call.spelling not in ("move", "forward")

    def call(self, cursor) -> None:
        """Operators on objects, arguments in another order, min for max, a call left out."""
        k = self.kinds
        arguments = [a for a in cursor.get_arguments() if a is not None]
        target = cursor.referenced
        if target is None or target.kind == k.CONSTRUCTOR or cursor.spelling in WITHOUT_EFFECT:
            return
        if cursor.spelling.startswith("operator"):
            self.operator_call(cursor, arguments)
            return
        arguments = [a for a in arguments if self.is_written(cursor, a)]
        self.extreme(cursor)
        self.exchanged(cursor, arguments)
        self.left_out(cursor, arguments)

    def is_written(self, call, argument) -> bool:
        """False for default arguments, which stand elsewhere."""
        begin, end = self.span(argument)
        return self.is_here(argument) and call.extent.start.offset < begin < end

    def operator_call(self, cursor, arguments) -> None:
        if len(arguments) != 2 or not all(self.is_here(a) for a in arguments):
            return
        left, right = arguments
        if left.extent.end.offset > right.extent.start.offset:
            return
        operator = self.between(left, right)
        if other := ASSIGNMENTS.get(operator):
            self.add(cursor, "assignment", f"{self.words(left)} {other} {self.words(right)}")
        else:
            is_tensor = self.is_tensor(left) or self.is_tensor(right)
            self.swap_operator(cursor, left, right, operator, is_tensor)

    def extreme(self, cursor) -> None:
        other = {"min": "max", "max": "min"}.get(cursor.spelling)
        text = self.words(cursor)
        head = re.match(r"(?:std::|at::|std::ranges::)?(min|max)\b", text)
        if other and head:
            self.add(cursor, "extreme", text[: head.start(1)] + other + text[head.end(1) :])

    def exchanged(self, cursor, arguments) -> None:
        """The first two neighbors of one type in each other's place."""
        if cursor.spelling in COMMUTATIVE:
            return
        for left, right in zip(arguments, arguments[1:], strict=False):
            same = bare_type(left) == bare_type(right) and bare_type(left) != ""
            if not same or self.words(left) == self.words(right):
                continue
            begin, end = self.span(cursor)
            text = (
                self.raw(begin, left.extent.start.offset)
                + self.words(right)
                + self.raw(left.extent.end.offset, right.extent.start.offset)
                + self.words(left)
                + self.raw(right.extent.end.offset, end)
            )
            self.add(cursor, "arguments", one_line(text))
            return

    def left_out(self, cursor, arguments) -> None:
        """`x` for `x.f(...)` and for `f(x, ...)`, where both have one type."""
        result = bare_type(cursor)
        if result in ("", "void", "bool"):
            return
        callee = next(iter(cursor.get_children()), None)
        if callee is not None and callee.kind == self.kinds.MEMBER_REF_EXPR:
            base = next(iter(callee.get_children()), None)
            if base is not None and self.is_expression(base) and bare_type(base) == result:
                self.add(cursor, "call", self.words(base))
                return
        for argument in arguments:
            if bare_type(argument) == result:
                self.add(cursor, "call", self.words(argument))
                return

    # ---- statements ------------------------------------------------------------------------------

    def is_statement_of(self, child, parent) -> bool:
        """True for an expression that stands as a statement."""
        k = self.kinds
        if not self.is_expression(child):
            return False
        if parent.kind == k.COMPOUND_STMT:
            return True
        siblings = list(parent.get_children())
        if parent.kind == k.IF_STMT:
            return any(child == s for s in siblings[1:])
        if parent.kind in (k.FOR_STMT, k.WHILE_STMT, k.CXX_FOR_RANGE_STMT):
            return child == siblings[-1]
        return False

    def statement(self, cursor) -> None:
        """The statement is left out."""
        k = self.kinds
        inner = cursor
        while inner.kind == k.UNEXPOSED_EXPR:
            following = next(iter(inner.get_children()), None)
            if following is None or self.span(following) != self.span(inner):
                break
            inner = following
        taken = (
            k.CALL_EXPR,
            k.BINARY_OPERATOR,
            k.COMPOUND_ASSIGNMENT_OPERATOR,
            k.UNARY_OPERATOR,
        )
        if inner.kind in taken and inner.spelling not in WITHOUT_EFFECT:
            self.add(inner, "statement", "", is_statement=True)


def two_children(cursor):
    """Both sides of an operator; (None, None) for what is none."""
    children = list(cursor.get_children())
    return (children[0], children[1]) if len(children) == 2 else (None, None)


def bare_type(cursor) -> str:
    """The type of an expression without const and reference; "" if it is not known."""
    kind = cursor.type.get_canonical()
    if kind.kind in (cindex.TypeKind.LVALUEREFERENCE, cindex.TypeKind.RVALUEREFERENCE):
        kind = kind.get_pointee()
    if kind.kind in (cindex.TypeKind.INVALID, cindex.TypeKind.DEPENDENT):
        return ""
    return kind.spelling.removeprefix("const ").strip()


def mutants_of(parser, source: pathlib.Path, name: str) -> list[Mutant]:
    """All mutants of a source, in the order of its text; `name` is what reports call it."""
    text = source.read_bytes()
    finder = Finder(parser.parse(source), source, name, text)
    found = sorted(finder.found.values(), key=lambda m: (m.begin, -m.end, m.kind, m.after))
    lines = text.decode("utf-8").splitlines()
    counts: collections.Counter = collections.Counter()
    result = []
    for mutant in found:
        line = lines[mutant.line - 1].strip()
        change = (line, mutant.kind, mutant.before, mutant.after)
        result.append(dataclasses.replace(mutant, context=f"{line}\0{counts[change]}"))
        counts[change] += 1
    return result
