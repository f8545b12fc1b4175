// SPDX-License-Identifier: Apache-2.0
/// Signal handlers of ranks. Everything that runs in a handler uses async-signal-safe calls only.
#include "harness/world/forked/crash_handler.h"

#include <cxxabi.h>
#include <execinfo.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <exception>
#include <memory>

#include "core/system/input_guard.h"

namespace isoshard {
namespace {

constexpr std::string_view kBegin = "*** isoshard backtrace of rank ";
constexpr std::string_view kEnd = "*** end of backtrace\n";
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::array kFatalSignals{SIGABRT};  // the sanitizer's own reports of the others say more
#else
constexpr std::array kFatalSignals{SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
#endif

// One rank per process, so plain statics serve the handlers.
int own_rank = -1;
RankSlot* own_slot = nullptr;
std::array<std::byte, 64 * 1024> alternate_stack;

void write_text(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void write_backtrace(std::string_view cause) {
  std::array<char, 4> digits{static_cast<char>('0' + own_rank / 10 % 10),
                             static_cast<char>('0' + own_rank % 10)};
  write_text("\n");
  write_text(kBegin);
  write_text(std::string_view(digits.data(), 2).substr(own_rank < 10 ? 1 : 0));
  write_text(", ");
  write_text(cause);
  write_text("\n");
  std::array<void*, 64> frames{};
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  ::backtrace_symbols_fd(frames.data(), count, STDERR_FILENO);
  write_text(kEnd);
}

void on_fatal_signal(int signal) {
  const char* name = ::sigabbrev_np(signal);
  write_backtrace(name != nullptr ? name : "signal");
  // Raised again with the default action, so that the controller sees the signal itself.
  ::signal(signal, SIG_DFL);
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, signal);
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
  ::raise(signal);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void on_bus_error(int signal, siginfo_t* info, void* /*context*/) {
  // an input file was shortened: the rank goes on, and says so at its end
  if (info->si_code == BUS_ADRERR && detail::mend_guarded_range(info->si_addr)) return;
  on_fatal_signal(signal);
}
#endif

void on_dump_signal(int /*signal*/) {
  const int saved_errno = errno;
  write_backtrace("at the deadline");
  own_slot->has_dumped_stack.store(true, std::memory_order_release);
  write_text("\n");  // wakes the controller, which then sees the flag
  errno = saved_errno;
}

[[noreturn]] void on_terminate() {
  try {
    const std::string words = std::current_exception() ? "std::terminate after an uncaught " +
                                                             current_exception_in_words()
                                                       : "std::terminate without an exception";
    own_slot->last_words.set(words);
    write_text("\n" + words + "\n");
  } catch (...) {  // out of memory: the signal must do
  }
  std::abort();
}

std::string demangled(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name, nullptr, nullptr, &status), &std::free);
  return status == 0 ? text.get() : name;
}

}  // namespace

void prepare_backtraces() {
  std::array<void*, 4> frames{};
  (void)::backtrace(frames.data(), static_cast<int>(frames.size()));
}

void install_crash_handlers(int rank, RankSlot& slot) {
  own_rank = rank;
  own_slot = &slot;
  stack_t stack{};
  stack.ss_sp = alternate_stack.data();
  stack.ss_size = alternate_stack.size();
  ::sigaltstack(&stack, nullptr);
  struct sigaction action {};
  ::sigemptyset(&action.sa_mask);
  action.sa_handler = on_fatal_signal;
  action.sa_flags = SA_ONSTACK | static_cast<int>(SA_RESETHAND);
  for (const int signal : kFatalSignals) ::sigaction(signal, &action, nullptr);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  struct sigaction bus_error {};
  ::sigemptyset(&bus_error.sa_mask);
  bus_error.sa_sigaction = on_bus_error;
  bus_error.sa_flags = SA_ONSTACK | SA_SIGINFO;
  ::sigaction(SIGBUS, &bus_error, nullptr);
#endif
  action.sa_handler = on_dump_signal;
  action.sa_flags = SA_ONSTACK | SA_RESTART;
  ::sigaction(kDumpSignal, &action, nullptr);
  std::set_terminate(on_terminate);
}

std::string signal_name(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return name != nullptr ? fmt::format("SIG{}", name) : fmt::format("signal {}", signal);
}

std::string backtrace_in(std::string_view standard_error) {
  const std::size_t begin = standard_error.rfind(kBegin);
  if (begin == std::string_view::npos) return {};
  const std::size_t end = standard_error.find(kEnd, begin);
  return std::string(
      standard_error.substr(begin, end == std::string_view::npos ? end : end - begin));
}

std::string current_exception_in_words() {
  const std::type_info* type = abi::__cxa_current_exception_type();
  const std::string name =
      type != nullptr ? demangled(type->name()) : "exception of an unknown type";
  try {
    throw;
  } catch (const std::exception& error) {
    const std::string_view text = error.what();
    // LibTorch appends the stack; what is wrong stands before it.
    return fmt::format("{}: {}", name, text.substr(0, text.find("\nException raised from")));
  } catch (...) {
    return fmt::format("{} (not a std::exception, so it has no text)", name);
  }
}

}  // namespace isoshard
