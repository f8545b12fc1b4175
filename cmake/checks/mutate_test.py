#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/mutate makes the mutants that it should, they compile, and a switch turns on one of them.

usage: mutate_test.py COMPILER FOLDER

Where libclang's Python bindings are missing, what needs them is skipped (exit code 77).
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import unittest

TREE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TREE / "tools" / "mutate"))

import choose  # noqa: E402
import mutations  # noqa: E402
import page  # noqa: E402
import runs  # noqa: E402
import scratch  # noqa: E402
import sources  # noqa: E402
import switches  # noqa: E402

COMPILER, FOLDER = "c++", pathlib.Path()

# A line that ends with "none" has no mutant.
FIXTURE = """\
#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

enum class Sum { kAll, kMean };
constexpr int kSize = 3;  // none
static_assert(kSize + 1 == 4);  // none
#define TWICE(x) ((x) + (x))
int calls = 0;  // zero
void count(int by) { calls += by; }
int plus(int a, int b) { return a + b; }
int least(int a, int b) { return std::min(a, b); }
constexpr int half(int n) { return n / 2; }
bool is_small(int n) {
  if (n < 0) throw std::runtime_error("n is " + std::to_string(n + 1));
  return n < kSize && n != 1;
}
int picked(Sum sum) {
  switch (sum) {
    case Sum::kAll:  // none
      return 7;
    case Sum::kMean:  // none
      break;
  }
  return TWICE(4);
}
int total(const std::vector<int>& values) {
  int sum = 0;
  std::vector<int> kept;
  kept.reserve(8);  // none
  for (const int value : values) {
    kept.push_back(value);
    sum += value;  // added
  }
  count(2);
  return sum + picked(Sum::kMean);
}
std::string message_of(int n) { return std::string(n + 1, 'x'); }  // none
int main() {
  const int zero = 0, sum = total({5, 6});
  std::printf("%d %d %d %d %d %d\\n", plus(1, 2), least(4, 3), static_cast<int>(is_small(2)),
              half(8), sum, calls + zero);
}
"""


def fixture(name: str = "fixture") -> pathlib.Path:
    """A build folder with compile_commands.json, and the source as its only file."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "src").mkdir(parents=True)
    source = folder / "src" / "fixture.cc"
    source.write_text(FIXTURE, encoding="utf-8")
    command = f"{COMPILER} -std=c++20 -DKEPT=1 -O2 -c {source}"
    entry = {"directory": str(folder), "file": str(source), "command": command}
    (folder / "compile_commands.json").write_text(json.dumps([entry]), encoding="utf-8")
    return folder


def found_in(folder: pathlib.Path) -> list[mutations.Mutant]:
    """The mutants of the fixture in a folder."""
    parser = sources.Parser(sources.Compiled(folder), folder / "trees")
    return mutations.mutants_of(parser, folder / "src" / "fixture.cc", "src/fixture.cc")


@unittest.skipIf(sources.cindex is None, "no Python bindings of libclang")
class OfAFixture(unittest.TestCase):
    """One small source with one of each."""

    def test_each_kind_is_made_at_its_place(self) -> None:
        lines = FIXTURE.splitlines()
        made = {(lines[m.line - 1].strip(), m.kind, m.before, m.after) for m in found_in(fixture())}

        for line, kind, before, after in [
            ("int calls = 0;  // zero", "literal", "0", "1"),
            ("void count(int by) { calls += by; }", "assignment", "calls += by", "calls -= by"),
            ("void count(int by) { calls += by; }", "statement", "calls += by", ""),
            ("int plus(int a, int b) { return a + b; }", "arithmetic", "a + b", "a - b"),
            ("int plus(int a, int b) { return a + b; }", "return", "a + b", "(a + b) + 1"),
            (
                "int least(int a, int b) { return std::min(a, b); }",
                "extreme",
                "std::min(a, b)",
                "std::max(a, b)",
            ),
            ("constexpr int half(int n) { return n / 2; }", "arithmetic", "n / 2", "n * 2"),
            ("return n < kSize && n != 1;", "logic", "n < kSize && n != 1", "n < kSize || n != 1"),
            ("return n < kSize && n != 1;", "compare", "n < kSize", "n <= kSize"),
            ("sum += value;  // added", "statement", "sum += value", ""),
            ("count(2);", "statement", "count(2)", ""),
            ("count(2);", "literal", "2", "3"),
            ("return sum + picked(Sum::kMean);", "enumerator", "Sum::kMean", "Sum::kAll"),
        ]:
            self.assertIn((line, kind, before, after), made)

    def test_what_cannot_run_or_makes_words_has_none(self) -> None:
        lines = FIXTURE.splitlines()
        for mutant in found_in(fixture()):
            line = lines[mutant.line - 1]
            self.assertFalse(line.endswith("none"), f"{line}: {mutant}")
            self.assertNotIn("to_string", mutant.before)  # only in a message that is thrown
            self.assertNotIn("TWICE", mutant.before)

    def test_keys_are_those_of_the_text_wherever_it_stands(self) -> None:
        keys = [mutant.key for mutant in found_in(fixture())]
        self.assertEqual(len(keys), len(set(keys)))
        folder = fixture()
        source = folder / "src" / "fixture.cc"
        source.write_text("\n\n" + FIXTURE, encoding="utf-8")
        self.assertEqual([mutant.key for mutant in found_in(folder)], keys)

    def test_a_source_that_does_not_compile_is_refused(self) -> None:
        folder = fixture()
        (folder / "src" / "fixture.cc").write_text("int x = y;\n", encoding="utf-8")
        with self.assertRaisesRegex(sources.MutateError, "must compile by Clang"):
            found_in(folder)

    def test_all_are_switches_of_one_program(self) -> None:
        folder = fixture("program")
        numbered = dict(enumerate(sorted(found_in(folder), key=choose.order_in_text), 1))
        source, program = folder / "src" / "fixture.cc", folder / "program"
        source.write_bytes(switches.switched(source.read_bytes(), numbered))
        (folder / "src" / switches.HEADER_NAME).write_text(switches.header(len(numbered)))
        command = [COMPILER, "-std=c++20", "-w", "-o", program, source]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        seen = folder / "seen"
        seen.write_bytes(bytes(len(numbered) + 1))

        def output(number: int) -> str:
            variables = {"ISOSHARD_MUTANT": str(number), "ISOSHARD_MUTANTS_SEEN": str(seen)}
            done = subprocess.run(
                [program], capture_output=True, text=True, env=dict(os.environ) | variables
            )
            return done.stdout.strip()

        def number_of(kind: str, before: str, after: str) -> int:
            change = (kind, before, after)
            fits = [n for n, m in numbered.items() if (m.kind, m.before, m.after) == change]
            self.assertEqual(len(fits), 1, (kind, before, after))
            return fits[0]

        self.assertEqual(output(0), "3 3 1 4 19 2")
        self.assertEqual(output(number_of("arithmetic", "a + b", "a - b")), "-1 3 1 4 19 2")
        self.assertEqual(
            output(number_of("extreme", "std::min(a, b)", "std::max(a, b)")), "3 4 1 4 19 2"
        )
        self.assertEqual(output(number_of("arithmetic", "n / 2", "n * 2")), "3 3 1 16 19 2")
        self.assertEqual(output(number_of("statement", "sum += value", "")), "3 3 1 4 8 2")
        self.assertEqual(output(number_of("statement", "count(2)", "")), "3 3 1 4 19 0")
        self.assertEqual(output(number_of("enumerator", "Sum::kMean", "Sum::kAll")), "3 3 1 4 18 2")
        bytes_seen = seen.read_bytes()
        self.assertEqual(bytes_seen[number_of("statement", "count(2)", "")], 1)
        self.assertEqual(bytes_seen[0], 0)
        self.assertEqual(sum(bytes_seen), len(numbered))


def made_up(folder: str, line: int, kind: str = "literal") -> mutations.Mutant:
    """A mutant of a file that does not exist."""
    name = f"src/{folder}/file.cc"
    return mutations.Mutant(
        name, line, line, 100 * line, 100 * line + 9, kind, "1", "2", context=str(line)
    )


class OfAChoice(unittest.TestCase):
    """Which mutants are taken."""

    def setUp(self) -> None:
        self.mutants = [made_up("large", n) for n in range(400)]
        self.mutants += [made_up("small", n, "call") for n in range(4)]
        self.mutants += [made_up("large", n, "call") for n in range(400, 404)]

    def test_a_seed_gives_its_own_and_each_folder_and_kind_its_share(self) -> None:
        chosen = choose.Choice(self.mutants, 20, 1).chosen()

        self.assertEqual(len(chosen), 20)
        self.assertEqual(chosen, choose.Choice(list(reversed(self.mutants)), 20, 1).chosen())
        self.assertNotEqual(chosen, choose.Choice(self.mutants, 20, 2).chosen())
        self.assertGreaterEqual(sum("small" in m.name for m in chosen), 3)
        self.assertEqual(sum(m.kind == "call" and "large" in m.name for m in chosen), 4)

    def test_others_of_the_folder_take_the_place_of_what_is_dropped(self) -> None:
        choice = choose.Choice(self.mutants, 20, 1)
        before = choice.chosen()
        dropped = {m for m in before if "large" in m.name and m.kind == "literal"}

        choice.drop(dropped)

        self.assertEqual(len(choice.chosen()), 20)
        self.assertFalse(dropped & set(choice.chosen()))

    def test_a_line_is_taken_twice_only_when_each_was_taken_once(self) -> None:
        kinds = ("literal", "call", "compare")
        mutants = [made_up("a", line, kind) for line in range(1, 6) for kind in kinds]

        chosen = choose.Choice(mutants, 5, 1).chosen()

        self.assertEqual({m.line for m in chosen}, {1, 2, 3, 4, 5})

    def test_of_two_pieces_that_cross_one_is_taken(self) -> None:
        one = made_up("a", 1)
        crossing = mutations.Mutant(one.name, 1, 1, one.begin + 5, one.end + 5, "call", "1", "2")

        self.assertEqual(len(choose.Choice([one, crossing], 2, 1).chosen()), 1)


class OfABuild(unittest.TestCase):
    """What the compiler says, and what a result counts as."""

    def test_an_error_is_blamed_on_the_mutants_of_its_line(self) -> None:
        place = scratch.Scratch(TREE, FOLDER / "none")
        mutants = [made_up("a", 3), made_up("a", 4), made_up("b", 3)]
        log = "FAILED: x.o\n../src/a/file.cc: In function:\n../src/a/file.cc:3:5: error: no\n"

        self.assertEqual(place.blamed(log, mutants), [mutants[0]])
        with self.assertRaisesRegex(sources.MutateError, "no mutant is to blame"):
            place.blamed("FAILED: x.o\n../src/c/file.cc:3:5: error: no\n", mutants)

    def test_lines_keep_their_numbers(self) -> None:
        text = b"int a = 1;\nint b = 2 +\n  3;\n"
        begin = text.index(b"2")
        mutant = mutations.Mutant("f", 2, 3, begin, begin + 7, "arithmetic", "2 + 3", "2 - 3")

        result = switches.switched(text, {5: mutant}).decode()

        switch = "(isoshard_mutants::on(5) ? (2 - 3) : (2 +\n  3))"
        self.assertTrue(result.endswith(f"#line 1\nint a = 1;\nint b = {switch};\n"), result)

    def test_states_are_those_of_the_results(self) -> None:
        def state(verify: str, tests: str = "") -> str:
            phases = {"verify": {"result": verify}} if verify else {}
            phases |= {"tests": {"result": tests}} if tests else {}
            return page.state_of(phases, "key", {"known": "why"} | ({"key": "it"} if known else {}))

        known = False
        self.assertEqual(state("diverges"), "verify")
        self.assertEqual(state("no end"), "verify")
        self.assertEqual(state("conforms", "base_test.in_process"), "tests")
        self.assertEqual(state("not run", "passes"), "survived")
        self.assertEqual(state("conforms"), "")
        known = True
        self.assertEqual(state("conforms", "passes"), "equivalent")
        self.assertEqual(state("diverges"), "verify")

    def test_a_command_that_does_not_end_is_ended(self) -> None:
        self.assertIsNone(runs.run(["sleep", "600"], 0.2, dict(os.environ), FOLDER))
        self.assertEqual(runs.run(["false"], 60, dict(os.environ), FOLDER), 1)

    def test_a_command_has_shared_memory_of_its_own(self) -> None:
        if not runs.room_of_its_own(FOLDER.is_relative_to("/tmp")):
            self.skipTest("namespaces are not permitted here")
        shared = pathlib.Path(f"/dev/shm/isoshard_mutate_test_{os.getpid()}")
        shared.touch()
        try:
            alone = ["test", "!", "-e", shared,]
            self.assertEqual(runs.run(alone, 60, dict(os.environ), FOLDER), 0)
        finally:
            shared.unlink()

    def test_each_equivalent_mutant_says_why(self) -> None:
        for key, why in page.equivalents().items():
            self.assertRegex(key, "^[0-9a-f]{12}$")
            self.assertGreater(len(why), 20)


if __name__ == "__main__":
    COMPILER, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    FOLDER.mkdir(parents=True, exist_ok=True)
    result = unittest.main(argv=sys.argv[:1], exit=False, verbosity=2).result
    if not result.wasSuccessful():
        sys.exit(1)
    sys.exit(77 if result.skipped else 0)
