// SPDX-License-Identifier: Apache-2.0
/// Time in which this process did not run: a suspended machine, SIGSTOP, a frozen container.
#pragma once
#include <chrono>
#include <string>
#include <string_view>

namespace isoshard {

/// Watches a wait: constructed before it, asked after it.
///
///     PauseWatch watch(until);
///     poll(...);
///     world.on_pause(watch.pause());
class PauseWatch {
 public:
  /// `until`: when the wait is to end at the latest, on the steady clock.
  explicit PauseWatch(std::chrono::steady_clock::time_point until) noexcept;
  /// By how much it ended later, and for how long the machine was suspended meanwhile, which the
  /// steady clock does not count. 0 for less than a second: an ordinary delay.
  [[nodiscard]] std::chrono::milliseconds pause() const noexcept;

 private:
  std::chrono::steady_clock::time_point until_;
  std::chrono::nanoseconds suspended_before_;
};

/// For reports: all pauses of this process while worlds ran, since the last call.
void add_host_pause(std::chrono::milliseconds pause) noexcept;
[[nodiscard]] std::chrono::milliseconds take_host_pauses() noexcept;

/// "the host was suspended or stopped for 31.2 s while NAME ran: ..."; empty for no pause.
[[nodiscard]] std::string host_pause_in_words(std::chrono::milliseconds pause,
                                              std::string_view name);

}  // namespace isoshard
