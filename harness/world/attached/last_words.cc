// SPDX-License-Identifier: Apache-2.0
/// Everything that runs in a handler uses async-signal-safe calls only.
#include "harness/world/attached/last_words.h"

#include <execinfo.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>

#include "harness/world/forked/crash_handler.h"
#include "harness/world/forked/rank_slot.h"

namespace isoshard {
namespace {

constexpr int kCrashExitCode = 4;
constexpr std::array kWatchedSignals{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
constexpr std::array kEndingSignals{SIGTERM, SIGINT, SIGHUP};

// One per process, so plain statics serve the handlers.
int watched_rank = 0;
pid_t own_pid = 0;
SharedText<96> who;    ///< "rank 1 of 4 on node7"
SharedText<64> phase;  ///< "step 0: clipping"
SharedText<512> uncaught;
const Journal* journal = nullptr;
std::array<std::byte, 64 * 1024> last_words_stack;

/// A line that is written at once, so that lines of several ranks do not mix.
class Line {
 public:
  Line& text(std::string_view part) noexcept {
    const std::size_t count = std::min(part.size(), bytes_.size() - used_);
    std::memcpy(bytes_.data() + used_, part.data(), count);
    used_ += count;
    return *this;
  }
  Line& number(std::uint64_t value) noexcept {
    std::array<char, 20> digits{};
    std::size_t first = digits.size();
    do {
      digits[--first] = static_cast<char>('0' + value % 10);
      value /= 10;
    } while (value != 0);
    return text({digits.data() + first, digits.size() - first});
  }
  void write() noexcept {
    if (used_ == bytes_.size()) --used_;
    bytes_[used_++] = '\n';
    (void)!::write(STDERR_FILENO, bytes_.data(), used_);
  }

 private:
  std::array<char, 1024> bytes_;
  std::size_t used_ = 0;
};

void write_line(std::string_view what, int signal) noexcept {
  Line line;
  const char* const name = ::sigabbrev_np(signal);
  line.text("isoshard: ").text(who.c_str()).text(what).text("SIG");
  line.text(name == nullptr ? "?" : name);
  if (journal != nullptr) {
    const std::optional<JournalEntry> last = journal->last(watched_rank);
    if (!last.has_value()) {
      line.text(" before its first collective");
    } else {
      line.text(last->state == CallState::kEntered ? " in " : " after ");
      line.text(name_of(last->call.op)).text(" #").number(last->call.group_sequence);
      line.text(" (").text(name_of(last->call.purpose)).text(", ").text(name_of(last->call.axis));
      line.text(")");
    }
  }
  if (*phase.c_str() != '\0') line.text(", phase ").text(phase.c_str());
  if (*uncaught.c_str() != '\0') line.text(": ").text(uncaught.c_str());
  line.write();
}

void say_last_words(int signal) {
  if (::getpid() != own_pid) ::_exit(kCrashExitCode);  // a child that has not installed its own yet
  write_line(" was ended by ", signal);
  std::array<void*, 64> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  ::backtrace_symbols_fd(frames.data(), count, STDERR_FILENO);
  ::_exit(kCrashExitCode);
}

void on_ending_signal(int signal) {
  if (::getpid() == own_pid) write_line(" was told to end by ", signal);
  ::_exit(128 + signal);
}

[[noreturn]] void say_last_words_of_exception() {
  try {
    uncaught.set(std::current_exception() ? "uncaught " + current_exception_in_words()
                                          : "std::terminate without an exception");
  } catch (...) {  // out of memory: the signal must do
  }
  std::abort();
}

}  // namespace

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown host";
  return name.data();
}

void install_last_words(int rank, int size) {
  watched_rank = rank;
  own_pid = ::getpid();
  who.set("rank " + std::to_string(rank) + " of " + std::to_string(size) + " on " + host_name());
  prepare_backtraces();
  stack_t stack{};
  stack.ss_sp = last_words_stack.data();
  stack.ss_size = last_words_stack.size();
  ::sigaltstack(&stack, nullptr);
  struct sigaction action {};
  ::sigemptyset(&action.sa_mask);
  action.sa_flags = SA_ONSTACK | static_cast<int>(SA_RESETHAND);
  action.sa_handler = say_last_words;
  for (const int signal : kWatchedSignals) ::sigaction(signal, &action, nullptr);
  action.sa_handler = on_ending_signal;
  for (const int signal : kEndingSignals) {
    struct sigaction before {};
    ::sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) ::sigaction(signal, &action, nullptr);  // as under nohup
  }
  std::set_terminate(say_last_words_of_exception);
}

void set_phase_of_last_words(std::string_view text) noexcept {
  phase.set(text);
}

void set_journal_of_last_words(const Journal* of_world) noexcept {
  journal = of_world;
}

}  // namespace isoshard
