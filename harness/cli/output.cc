// SPDX-License-Identifier: Apache-2.0
/// Standard output.
#include "harness/cli/output.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <system_error>

#include "core/base/error.h"
#include "core/system/standard_descriptors.h"

namespace isoshard {

namespace {

std::atomic<int> first_error{0};
bool is_silent = false, is_quiet_now = false;

std::string& errors() {
  static std::string text;
  return text;
}

bool has_colors() {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string_view(value == nullptr ? "" : value);
  };
  return isatty(STDOUT_FILENO) != 0 && variable("NO_COLOR").empty() && variable("TERM") != "dumb" &&
         std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr;
}

// 0, or the number of the error.
int write_all(int fd, std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EAGAIN) {  // a pipe that its other end made non-blocking
      pollfd room{fd, POLLOUT, 0};
      (void)::poll(&room, 1, -1);
      continue;
    }
    if (written <= 0) return written < 0 ? errno : ENOSPC;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

}  // namespace

void prepare_output() {
  occupy_standard_descriptors();
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

void print(const std::string& text) {
  std::fflush(stdout);
  if (first_error == 0 && !is_silent) first_error = write_all(STDOUT_FILENO, text);
}

void print_error(const std::string& line) {
  std::fflush(stderr);
  errors() += line + "\n";
  if (is_silent) return;
  (void)write_all(STDERR_FILENO, line + "\n");
}

void print_nothing() noexcept {
  is_silent = true;
}

std::string printed_errors() {
  return errors();
}

void set_quiet(bool is_quiet) noexcept {
  is_quiet_now = is_quiet;
}

bool is_quiet() noexcept {
  return is_quiet_now;
}

int output_error() noexcept {
  return first_error;
}

void require_printed() {
  if (first_error == 0 || first_error == EPIPE) return;
  throw InfrastructureError(fmt::format("cannot write to standard output: {}",
                                        std::generic_category().message(first_error)));
}

TextOptions terminal_options(bool all_tensors) {
  TextOptions options;
  options.verdict.color = has_colors();
  options.is_quiet = is_quiet();
  options.verdict.all_tensors = all_tensors;
  return options;
}

}  // namespace isoshard
