#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/mutate the whole way, on a tree of three sources with a program that stands for isoshard.

usage: mutate_whole_test.py COMPILER FOLDER

Exit code 77 where a tool that it needs is missing.
"""

import collections
import contextlib
import io
import json
import pathlib
import shutil
import subprocess
import sys
import unittest

TREE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TREE / "tools" / "mutate"))

import page  # noqa: E402
import runs  # noqa: E402
import scratch  # noqa: E402
import sources  # noqa: E402

COMPILER, FOLDER = "c++", pathlib.Path()

FILES = {
    "CMakeLists.txt": """\
cmake_minimum_required(VERSION 3.25)
project(small LANGUAGES C CXX)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
include_directories(src)
enable_testing()
add_subdirectory(src)
add_executable(isoshard_app app.cc)
target_link_libraries(isoshard_app PRIVATE small)
set_target_properties(isoshard_app PROPERTIES OUTPUT_NAME isoshard
  RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
add_executable(small_test small_test.cc)
target_link_libraries(small_test PRIVATE small)
add_test(NAME small_test COMMAND small_test)
add_test(NAME broken COMMAND false)
set_tests_properties(small_test broken PROPERTIES LABELS unit)
""",
    "src/CMakeLists.txt": "add_library(small STATIC part/small.cc)\n",
    "src/part/small.h": "int plus(int a, int b);\nint minus(int a, int b);\n"
    "int tested(int a);\nint never(int a);\nint loop(int a);\nint slots();\n",
    "src/part/small.cc": """\
#include "part/small.h"
#include <array>
int plus(int a, int b) { return a + b; }
int minus(int a, int b) { return a - b; }
int tested(int a) { return a * 7; }
int never(int a) { return a % 9; }
int loop(int a) {
  int steps = 0;
  while (steps < a) ++steps;
  return steps;
}
int slots() {
  const int count = 3;
  return static_cast<int>(std::array<int, count>().size());
}
""",
    "app.cc": """\
#include <fstream>
#include <iterator>
#include <string>
#include "part/small.h"
int main(int argc, char** argv) {
  std::string report;
  for (int i = 1; i + 1 < argc; ++i) {
    const std::string flag = argv[i], folder = argv[i + 1];
    if (flag == "--output-dir")
      std::ofstream(folder + "/report.json") << R"({"cases": [{"case": "a"}, {"case": "b"}]})";
    if (flag != "--failed-from") continue;
    std::ifstream in(folder + "/report.json");
    report.assign(std::istreambuf_iterator<char>(in), {});
  }
  if (report.find("\\"a\\"") != std::string::npos && plus(2, 3) + loop(2) + slots() != 10) return 1;
  if (report.find("\\"b\\"") != std::string::npos && minus(5, 3) != 2) return 4;
  return 0;
}
""",
    "small_test.cc": '#include "part/small.h"\nint main() { return tested(2) == 14 ? 0 : 1; }\n',
}


def mutated() -> scratch.Scratch:
    """A copy of the small tree with all of its mutants, built."""
    tree = FOLDER / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.rmtree(FOLDER / "copy", ignore_errors=True)
    for name, text in FILES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    for command in (["git", "init", "-q"], ["git", "add", "."]):
        subprocess.run(command, cwd=tree, check=True)
    (tree / "build").mkdir()
    cache = f"CMAKE_CXX_COMPILER:FILEPATH={COMPILER}\n"
    (tree / "build" / "CMakeCache.txt").write_text(cache, encoding="utf-8")
    made = scratch.Scratch(tree, FOLDER / "copy")
    made.make(tree / "build", 1000, 1, 2)
    return made


class OfASmallTree(unittest.TestCase):
    """Every mutant ends where it must."""

    def test_the_whole_way(self) -> None:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            made = mutated()
            kept = runs.Runs(made, 2)
            kept.verify_all(set())
            kept.test_survivors(set())

        results = kept.results()
        states = collections.defaultdict(set)
        lines = FILES["src/part/small.cc"].splitlines()
        for mutant in kept.data["mutants"]:
            phases = results[mutant["key"]]
            states[lines[mutant["line"] - 1].split("(")[0]].add(page.state_of(phases, "", {}))
            if mutant["before"] == "++steps":
                self.assertEqual(phases["verify"]["result"], "no end")
            if lines[mutant["line"] - 1].startswith("int minus"):
                self.assertEqual(phases["verify"]["result"], "crash, error or hang")
        self.assertEqual(states["int plus"], {"verify"})
        self.assertEqual(states["int minus"], {"verify"})
        self.assertEqual(states["int tested"], {"tests"})
        self.assertEqual(states["int never"], {"survived"})
        # the size of an array must be known to the compiler
        self.assertNotIn("  const int count = 3;", states)
        self.assertGreaterEqual(kept.data["refused"], 1)
        self.assertIn("left out: broken fails without a mutant", said.getvalue())
        self.assertIn("| src/part |", page.Page(kept).text())

        # what has a result is not run again
        before = kept.journal.read_text(encoding="utf-8")
        again = runs.Runs(made, 2)
        with contextlib.redirect_stdout(said):
            again.verify_all(set())
            again.test_survivors(set())
        self.assertEqual(kept.journal.read_text(encoding="utf-8"), before)
        self.assertEqual(json.loads(again.recorded_file.read_text())["keys"], again.keys())


if __name__ == "__main__":
    COMPILER, FOLDER = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    missing = [name for name in ("git", "cmake", "ninja", "prlimit") if not shutil.which(name)]
    if missing or sources.cindex is None:
        print(f"SKIPPED: needs {', '.join(missing) or 'Python bindings of libclang'}")
        sys.exit(77)
    FOLDER.mkdir(parents=True, exist_ok=True)
    unittest.main(argv=sys.argv[:1], verbosity=2)
