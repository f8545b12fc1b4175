# SPDX-License-Identifier: Apache-2.0
"""What is compiled of a folder of sources, how, and as which syntax tree (libclang)."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import re
import shlex
import subprocess

try:
    from clang import cindex
except ImportError:  # told by require_libclang()
    cindex = None

KEPT_FLAGS = ("-D", "-I", "-std=")
KEPT_PAIRS = ("-isystem", "-idirafter", "-I")


class MutateError(Exception):
    """What a user can mend; the message says how."""


def require_libclang() -> None:
    """Fails with what to install where libclang's Python bindings are missing."""
    if cindex is None:
        raise MutateError(
            "libclang's Python bindings are missing: install python3-clang of Debian or Ubuntu "
            "and use its Python (/usr/bin/python3), or the package libclang of this Python"
        )


class Compiled:
    """The sources of a CMake build folder, from its compile_commands.json.

    Sources that are compiled several at once (unity builds) count one by one, and have the flags of
    the file that includes them, which is read once for all of them.
    """

    def __init__(self, build: pathlib.Path) -> None:
        file = build / "compile_commands.json"
        if not file.is_file():
            raise MutateError(f"{file} must exist, and does not: configure that build first")
        self.unit_of: dict[pathlib.Path, pathlib.Path] = {}  # by source
        self.flags: dict[pathlib.Path, tuple[str, ...]] = {}
        self.precompiled: dict[pathlib.Path, pathlib.Path] = {}
        for entry in json.loads(file.read_text(encoding="utf-8")):
            words = shlex.split(entry["command"])
            source = pathlib.Path(entry["file"])
            sources = [source]
            if source.name.startswith("unity_") and source.suffix == ".cxx":
                text = source.read_text(encoding="utf-8")
                sources = [pathlib.Path(name) for name in re.findall(r'#include "([^"]+)"', text)]
            self.unit_of |= dict.fromkeys(sources, source)
            self.flags[source] = flags_of(words)
            if header := precompiled_of(words):
                self.precompiled[source] = header


def flags_of(words: list[str]) -> tuple[str, ...]:
    """What decides the syntax tree, of a command line of a compiler."""
    kept: list[str] = []
    for word, following in zip(words, words[1:] + [""], strict=True):
        if word in KEPT_PAIRS:
            kept += [word, following]
        elif word.startswith(KEPT_FLAGS) and word not in KEPT_PAIRS:
            kept.append(word)
    return tuple(kept)


def precompiled_of(words: list[str]) -> pathlib.Path | None:
    """The header that CMake precompiled for this command."""
    for word, following in zip(words, words[1:], strict=False):
        if word == "-include" and following.endswith("cmake_pch.hxx"):
            return pathlib.Path(following)
    return None


@functools.cache
def resource_folder() -> str:
    """Clang's own headers, which bindings without a whole Clang lack."""
    for program in ("clang", "clang-14", "clang-15", "clang-16", "clang-17", "clang-18"):
        try:
            done = subprocess.run(
                [program, "-print-resource-dir"], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return done.stdout.strip()
    return ""


class Parser:
    """Syntax trees of sources. Headers that a build precompiles are read once, into `folder`."""

    def __init__(self, compiled: Compiled, folder: pathlib.Path) -> None:
        require_libclang()
        self.compiled = compiled
        self.folder = folder
        self.index = cindex.Index.create(excludeDecls=True)
        self.saved: dict[tuple[str, ...], pathlib.Path] = {}
        self.last: tuple[pathlib.Path, object] = (pathlib.Path(), None)
        self.cursors: dict[str, list] = {}  # the outermost of the last tree, by file

    def arguments_of(self, source: pathlib.Path) -> list[str]:
        """The flags of a source, and Clang's own."""
        flags = list(self.compiled.flags[source])
        if resources := resource_folder():
            flags += ["-resource-dir", resources]
        return [*flags, "-w"]

    def parse(self, source: pathlib.Path):
        """The outermost cursors of a source; what is compiled with it is read once.

        Errors   MutateError with Clang's first error: a tree with holes would have wrong mutants.
        """
        file = self.compiled.unit_of[source]
        if self.last[0] != file:
            self.last = (file, self.tree_of(file))
            self.cursors = {}
            for cursor in self.last[1].cursor.get_children():
                if place := cursor.location.file:
                    self.cursors.setdefault(place.name, []).append(cursor)
        unit = self.last[1]
        for item in unit.diagnostics:
            # Clang's own complaints about precompiled headers of GCC's library have no place
            place = item.location.file
            is_here = place is not None and place.name == str(source)
            least = cindex.Diagnostic.Error if is_here else cindex.Diagnostic.Fatal
            if item.severity >= least:
                raise MutateError(f"{source} must compile by Clang, got: {item}")
        return self.cursors.get(str(source), [])

    def errors_in(self, sources: set[pathlib.Path]) -> set[tuple[pathlib.Path, int]]:
        """Lines of these sources, as they stand now, of which Clang says that they are wrong."""
        found = set()
        for file in sorted({self.compiled.unit_of[source] for source in sources}):
            for item in self.tree_of(file).diagnostics:
                if item.severity >= cindex.Diagnostic.Error and item.location.file:
                    found.add((pathlib.Path(item.location.file.name), item.location.line))
        return {(file, line) for file, line in found if file in sources}

    def tree_of(self, file: pathlib.Path):
        """The tree of a file that is compiled."""
        arguments = self.arguments_of(file)
        if header := self.compiled.precompiled.get(file):
            arguments += ["-include-pch", str(self.saved_header(header, arguments))]
        return self.index.parse(
            str(file),
            args=arguments,
            options=cindex.TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD,
        )

    def saved_header(self, header: pathlib.Path, arguments: list[str]) -> pathlib.Path:
        """The precompiled header for Clang with these flags."""
        key = (str(header), *arguments)
        if key not in self.saved:
            self.folder.mkdir(parents=True, exist_ok=True)
            digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
            copy = self.folder / f"header_{digest}.hxx"
            text = re.sub(r"#pragma GCC system_header", "", header.read_text(encoding="utf-8"))
            target = copy.with_suffix(".pch")
            self.saved[key] = target
            if target.is_file() and copy.is_file() and copy.read_text(encoding="utf-8") == text:
                return target  # of an earlier run
            copy.write_text(text, encoding="utf-8")
            unit = self.index.parse(
                str(copy),
                args=["-x", "c++-header", *arguments],
                options=cindex.TranslationUnit.PARSE_INCOMPLETE
                | cindex.TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD,
            )
            unit.save(str(target))
        return self.saved[key]
