// SPDX-License-Identifier: Apache-2.0
// A table that a signal handler can read: no locks, no allocation.
#include "core/system/input_guard.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>

namespace isoshard::detail {
namespace {

constexpr std::size_t kMostRanges = 1024;

struct Range {
  std::atomic<bool> is_taken{false};
  std::atomic<bool> is_lost{false};
  std::atomic<std::uintptr_t> begin{0};  // 0: not to be looked at
  std::atomic<std::uintptr_t> end{0};
};

std::array<Range, kMostRanges> ranges;
std::uintptr_t page_bytes = 4096;
struct sigaction previous_action {};

void on_bus_error(int signal, siginfo_t* info, void* /*context*/) {
  if (info->si_code == BUS_ADRERR && mend_guarded_range(info->si_addr)) return;
  ::sigaction(signal, &previous_action, nullptr);
  // a fault comes again by itself, a signal that was sent does not
  if (info->si_code <= 0) ::raise(signal);
}

bool install_handler() noexcept {
  page_bytes = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  return ::sigaction(SIGBUS, &action, &previous_action) == 0;
}

}  // namespace

int guard_range(const std::byte* begin, std::size_t size) noexcept {
  static const bool is_installed = install_handler();
  if (!is_installed) return -1;
  for (std::size_t i = 0; i < kMostRanges; ++i) {
    bool free = false;
    if (!ranges[i].is_taken.compare_exchange_strong(free, true)) continue;
    ranges[i].is_lost = false;
    ranges[i].end = reinterpret_cast<std::uintptr_t>(begin) + size;
    ranges[i].begin = reinterpret_cast<std::uintptr_t>(begin);
    return static_cast<int>(i);
  }
  return -1;
}

void unguard_range(int range) noexcept {
  Range& gone = ranges[static_cast<std::size_t>(range)];
  gone.begin = 0;
  gone.is_taken = false;
}

bool is_lost(int range) noexcept {
  return ranges[static_cast<std::size_t>(range)].is_lost;
}

bool mend_guarded_range(const void* address) noexcept {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  for (Range& range : ranges) {
    const std::uintptr_t begin = range.begin, end = range.end;
    if (begin == 0 || at < begin || at >= end) continue;
    const int saved_errno = errno;
    const std::uintptr_t page = at / page_bytes * page_bytes;
    const bool is_mended =
        ::mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
    errno = saved_errno;
    range.is_lost = true;
    return is_mended;
  }
  return false;
}

}  // namespace isoshard::detail
