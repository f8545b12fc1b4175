// SPDX-License-Identifier: Apache-2.0
/// A self-pipe, so that poll() sees signals.
#include "harness/world/interrupt.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <string_view>

#include "core/base/error.h"

namespace isoshard {
namespace {

std::atomic<int> first_signal{0};
std::atomic<int> num_keepers{0};
std::array<int, 2> self_pipe{-1, -1};

void on_interrupt(int signal) {
  int expected = 0;
  if (num_keepers == 0 && first_signal == 0) {
    constexpr std::string_view kWords = "isoshard: interrupted\n";
    (void)!::write(STDERR_FILENO, kWords.data(), kWords.size());
    ::_exit(128 + signal);
  }
  // ranks die with this process
  if (!first_signal.compare_exchange_strong(expected, signal)) ::_exit(128 + signal);
  const int saved_errno = errno;
  (void)!::write(self_pipe[1], "!", 1);
  errno = saved_errno;
}

}  // namespace

void install_interrupt_handler() {
  if (self_pipe[0] < 0 && ::pipe2(self_pipe.data(), O_CLOEXEC | O_NONBLOCK) != 0) {
    throw InfrastructureError(
        fmt::format("cannot create a pipe for signals: {}", std::strerror(errno)));
  }
  first_signal = 0;
  num_keepers = 0;
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  // a program that nohup started stays deaf to it
  struct sigaction hangup {};
  if (::sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler != SIG_IGN)
    ::sigaction(SIGHUP, &action, nullptr);
}

KeepResults::KeepResults() noexcept {
  ++num_keepers;
}

KeepResults::~KeepResults() {
  --num_keepers;
}

int interrupt_signal() noexcept {
  return first_signal.load();
}

int interrupt_fd() noexcept {
  return self_pipe[0];
}

void leave_interrupts_to_controller() noexcept {
  ::signal(SIGINT, SIG_IGN);
  ::signal(SIGHUP, SIG_IGN);
  ::signal(SIGTERM, SIG_DFL);
  first_signal = 0;
  for (int& fd : self_pipe) {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
}

}  // namespace isoshard
