// SPDX-License-Identifier: Apache-2.0
/// Writes the progress line.
#include "harness/cli/progress.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <string>

#include "harness/cli/output.h"

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

std::size_t width_of(int terminal) {
  constexpr std::size_t kUsual = 80;
  winsize size{};
  if (::ioctl(terminal, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return kUsual;
  return size.ws_col;
}

std::string time_in_words(double seconds) {
  if (seconds < 90) return fmt::format("{:.0f} s", std::ceil(seconds));
  if (seconds < 90 * 60) return fmt::format("{:.0f} min", std::ceil(seconds / 60));
  return fmt::format("{:.1f} h", seconds / 3600);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
}  // namespace

std::string pace_in_words(int done, int total, double seconds) {
  if (done <= 0 || done >= total || !(seconds > 0)) return "";
  const double each = seconds / done;
  const std::string pace =
      each < 1 ? fmt::format("{:.3g} per s", 1 / each) : fmt::format("{:.3g} s each", each);
  return fmt::format("{}, {} left", pace, time_in_words(each * (total - done)));
}

Progress::Progress(int total)
    : total_(total),
      terminal_(can_redraw() && !is_quiet() ? ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3) : -1) {}

Progress::~Progress() {
  clear();
  if (terminal_ >= 0) ::close(terminal_);
}

void Progress::write(std::string_view what, const std::string& pace) const {
  if (terminal_ < 0) return;
  const std::string end = pace.empty() ? "" : "  " + pace;
  std::string line = fmt::format("[{}/{}] {}", done_, total_, what);
  const std::size_t width = width_of(terminal_) - 1;
  if (line.size() + end.size() > width)
    line.resize(width > end.size() ? std::min(line.size(), width - end.size()) : 0);
  write_to(terminal_, "\r\x1b[2K" + line + end);
}

void Progress::show(std::string_view what, bool advance) {
  if (advance) ++done_;
  write(what, pace_in_words(done_ - 1, total_, seconds_since(start_)));
}

void Progress::show_part(std::string_view what, std::string_view part, int number, int total) {
  if (number <= first_part_ || first_part_ == 0) {
    first_part_ = number;
    start_of_parts_ = Clock::now();
  }
  write(fmt::format("{}: {} {} of {}", what, part, number, total),
        pace_in_words(number - first_part_, total - first_part_, seconds_since(start_of_parts_)));
}

void Progress::clear() {
  if (terminal_ >= 0) write_to(terminal_, "\r\x1b[2K");
}

}  // namespace isoshard
