// SPDX-License-Identifier: Apache-2.0
// Two clocks: one counts suspended time, the other does not.
#include "harness/world/host_pause.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <ctime>

namespace isoshard {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::steady_clock;

constexpr milliseconds kOrdinaryDelay{1000};
std::atomic<std::int64_t> all_pauses_ms{0};

nanoseconds time_on(clockid_t clock) noexcept {
  timespec time{};
  (void)::clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
}

// Since the machine was started.
nanoseconds suspended() noexcept {
  const nanoseconds counted = time_on(CLOCK_MONOTONIC);
  return time_on(CLOCK_BOOTTIME) - counted;
}

}  // namespace

PauseWatch::PauseWatch(steady_clock::time_point until) noexcept
    : until_(until), suspended_before_(suspended()) {}

milliseconds PauseWatch::pause() const noexcept {
  const auto late = until_ == steady_clock::time_point::max()
                        ? nanoseconds(0)
                        : std::max(nanoseconds(0), nanoseconds(steady_clock::now() - until_));
  const auto pause = std::chrono::duration_cast<milliseconds>(
      late + std::max(nanoseconds(0), suspended() - suspended_before_));
  return pause < kOrdinaryDelay ? milliseconds(0) : pause;
}

void add_host_pause(milliseconds pause) noexcept {
  all_pauses_ms += pause.count();
}

milliseconds take_host_pauses() noexcept {
  return milliseconds(all_pauses_ms.exchange(0));
}

std::string host_pause_in_words(milliseconds pause, std::string_view name) {
  if (pause.count() == 0) return {};
  return fmt::format(
      "slow: the host was suspended or stopped for {:.1f} s while {} ran; the deadline began anew",
      static_cast<double>(pause.count()) / 1000, name);
}

}  // namespace isoshard
