// SPDX-License-Identifier: Apache-2.0
/// Writes the progress line.
#include "harness/cli/progress.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace isoshard {
namespace {
bool can_redraw() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDERR_FILENO) != 0 && terminal != nullptr && std::string_view(terminal) != "dumb";
}

// What does not fit the terminal is lost, and nothing depends on it.
void write_to(int terminal, const std::string& text) {
  (void)!::write(terminal, text.data(), text.size());
}
}  // namespace

Progress::Progress(int total)
    : total_(total), terminal_(can_redraw() ? ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3) : -1) {}

Progress::~Progress() {
  clear();
  if (terminal_ >= 0) ::close(terminal_);
}

void Progress::show(std::string_view what, bool advance) {
  if (advance) ++done_;
  if (terminal_ >= 0) write_to(terminal_, fmt::format("\r\x1b[2K[{}/{}] {}", done_, total_, what));
}

void Progress::clear() {
  if (terminal_ >= 0) write_to(terminal_, "\r\x1b[2K");
}

}  // namespace isoshard
