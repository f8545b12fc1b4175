// SPDX-License-Identifier: Apache-2.0
/// Standard output.
#include "harness/cli/output.h"

#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/base/error.h"
#include "core/system/standard_descriptors.h"

namespace isoshard {

namespace {

std::atomic<int> first_error{0};
bool is_silent = false;
Detail detail_now = Detail::kBrief;

std::vector<std::string>& words_of_launcher() {
  static std::vector<std::string> words;
  return words;
}

std::string& start_word() {
  static std::string word;
  return word;
}

std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string& errors() {
  static std::string text;
  return text;
}

bool has_colors() {
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

void set_output_detail(Detail detail) noexcept {
  detail_now = detail;
}

Detail output_detail() noexcept {
  return detail_now;
}

void set_started_as(std::string word) {
  start_word() = std::move(word);
}

std::string started_as(const std::string& otherwise) {
  return start_word().empty() ? otherwise : start_word();
}

void set_launcher_words(std::vector<std::string> words) {
  words_of_launcher() = std::move(words);
}

const std::vector<std::string>& launcher_words() {
  return words_of_launcher();
}

std::size_t terminal_columns(std::size_t otherwise) {
  constexpr std::size_t kLeast = 20, kMost = 100'000;  // others are mistakes of whoever set them
  const auto is_usable = [](std::size_t columns) { return columns >= kLeast && columns <= kMost; };
  const std::string_view words = variable("COLUMNS");
  std::size_t columns = 0;
  const auto read = std::from_chars(words.data(), words.data() + words.size(), columns);
  if (read.ec == std::errc() && read.ptr == words.data() + words.size() && is_usable(columns))
    return columns;
  winsize size{};
  if (isatty(STDOUT_FILENO) != 0 && ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 &&
      is_usable(size.ws_col))
    return size.ws_col;
  return otherwise;
}

int output_error() noexcept {
  return first_error;
}

void require_printed() {
  if (first_error == 0 || first_error == EPIPE) return;
  throw InfrastructureError(fmt::format("cannot write to standard output: {}",
                                        std::generic_category().message(first_error)));
}

TextOptions terminal_options() {
  TextOptions options;
  options.detail = output_detail();
  options.verdict.color = has_colors();
  options.verdict.columns = terminal_columns();
  options.verdict.all_tensors = options.detail == Detail::kFull;
  return options;
}

}  // namespace isoshard
