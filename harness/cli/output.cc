// SPDX-License-Identifier: Apache-2.0
/// Standard output.
#include "harness/cli/output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "core/base/error.h"

namespace isoshard {

void print(const std::string& text) {
  fmt::print("{}", text);
  if (std::fflush(stdout) != 0)
    throw InfrastructureError("cannot write the report to standard output; is its disk full?");
}

TextOptions terminal_options(bool all_tensors) {
  TextOptions options;
  options.verdict.color = isatty(STDOUT_FILENO) != 0;
  options.verdict.all_tensors = all_tensors;
  return options;
}

}  // namespace isoshard
