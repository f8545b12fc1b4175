// SPDX-License-Identifier: Apache-2.0
/// The whole program isoshard-judge but for main(): for main.cc, and for tests.
#pragma once
#include <string>
#include <vector>

namespace isoshard {

/// Runs the command that `arguments` (without the program's name) name, and gives back the exit
/// code. Prints to standard output, errors to standard error. Called once in a process.
[[nodiscard]] int run_judge(const std::vector<std::string>& arguments);

}  // namespace isoshard
