# SPDX-License-Identifier: Apache-2.0
"""Mutants as switches in one source: each piece becomes `(on(17) ? (wrong) : (right))`."""

from __future__ import annotations

from mutations import Mutant

HEADER_NAME = "isoshard_mutants.h"

# ISOSHARD_MUTANT chooses one mutant of a process and of all that it starts. ISOSHARD_MUTANTS_SEEN
# names a file of one byte a mutant: 1 once a process has come to its switch. Ranks are forked, so
# the mapping is theirs, too.
HEADER = """// SPDX-License-Identifier: Apache-2.0
// Made by tools/mutate.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <type_traits>

namespace isoshard_mutants {

inline constexpr int kSize = @SIZE@;
inline constinit bool is_started = false;
inline constinit int chosen = 0;
inline constinit unsigned char nobody[kSize] = {};
inline constinit unsigned char* seen = nobody;

// Every source with a mutant calls it, before anything else of a program runs.
[[gnu::constructor(101)]] inline void start() {
  if (is_started) return;
  is_started = true;
  if (const char* number = std::getenv("ISOSHARD_MUTANT")) chosen = std::atoi(number);
  const char* file = std::getenv("ISOSHARD_MUTANTS_SEEN");
  const int descriptor = file == nullptr ? -1 : ::open(file, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return;
  void* bytes = ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  if (bytes != MAP_FAILED) seen = static_cast<unsigned char*>(bytes);
}

inline bool on(int number) {
  if (seen[number] == 0) seen[number] = 1;
  return chosen == number;
}

// What a compiler may compute: there the mutant is off.
constexpr bool on_at_run_time(int number) {
  return std::is_constant_evaluated() ? false : on(number);
}

}  // namespace isoshard_mutants
"""


def header(count: int) -> str:
    """The switch, for `count` mutants."""
    return HEADER.replace("@SIZE@", str(count + 1))


def switched(text: bytes, mutants: dict[int, Mutant]) -> bytes:
    """The source with all these mutants in it, which have their numbers.

    Lines keep their numbers: what stands beside a piece stands in its first line.
    """
    events: list[tuple[int, int, int, str]] = []
    for number, mutant in mutants.items():
        function = "on_at_run_time" if mutant.is_constexpr else "on"
        condition = f"isoshard_mutants::{function}({number})"
        if mutant.is_statement:
            before, after = f"({condition} ? void() : static_cast<void>(", "))"
        elif mutant.kind == "condition":
            before, after = f"({condition} ? ({mutant.after}) : static_cast<bool>(", "))"
        else:
            before, after = f"({condition} ? ({mutant.after}) : (", "))"
        size = mutant.end - mutant.begin
        # at one place what closes comes first, from inside out, then what opens, from outside in
        events.append((mutant.begin, 1, -size * 100_000 + number, before))
        events.append((mutant.end, 0, size * 100_000 - number, after))
    pieces, position = [], 0
    for place, _, _, inserted in sorted(events):
        pieces += [text[position:place], inserted.encode()]
        position = place
    pieces.append(text[position:])
    return f'#include "{HEADER_NAME}"\n#line 1\n'.encode() + b"".join(pieces)


def lines_of(mutant: Mutant) -> range:
    """Lines whose compile errors may be this mutant's."""
    return range(mutant.line, mutant.last_line + 1)
