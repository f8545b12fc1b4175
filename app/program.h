// SPDX-License-Identifier: Apache-2.0
/// The whole program but for main(): for main.cc, and for tests that run it in a child process.
#pragma once
#include <string>
#include <vector>

namespace isoshard {

/// Makes this process a controller of ranks, runs the command that `arguments` (without the
/// program's name) name, and gives back the exit code. Prints to standard output, errors to
/// standard error. Called once in a process.
[[nodiscard]] int run_program(const std::vector<std::string>& arguments);

}  // namespace isoshard
