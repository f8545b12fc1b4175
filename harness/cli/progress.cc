// SPDX-License-Identifier: Apache-2.0
/// Writes the progress line.
#include "harness/cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace isoshard {
namespace {
bool can_redraw() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDERR_FILENO) != 0 && terminal != nullptr && std::string_view(terminal) != "dumb";
}
}  // namespace

Progress::Progress(int total) : total_(total), terminal_(can_redraw()) {}

Progress::~Progress() {
  clear();
}

void Progress::show(std::string_view what, bool advance) {
  if (advance) ++done_;
  if (!terminal_) return;
  fmt::print(stderr, "\r\x1b[2K[{}/{}] {}", done_, total_, what);
  std::fflush(stderr);
}

void Progress::clear() {
  if (!terminal_) return;
  fmt::print(stderr, "\r\x1b[2K");
  std::fflush(stderr);
}

}  // namespace isoshard
