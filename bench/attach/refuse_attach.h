// SPDX-License-Identifier: Apache-2.0
/// For benchmarks that have no ranks which mpirun could start.
#pragma once
#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

namespace isoshard {

/// Ends the program with its usage if --attach or --help is among the arguments, and says why it
/// does not attach.
inline void refuse_attach(int argc, char** argv, std::string_view usage, std::string_view why) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const bool asks = argument == "--help";
    if (!asks && argument != "--attach") continue;
    fmt::print(asks ? stdout : stderr, "{}\nno --attach: {}\n", usage, why);
    std::exit(asks ? 0 : 2);
  }
}

}  // namespace isoshard
