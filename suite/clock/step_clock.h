// SPDX-License-Identifier: Apache-2.0
/// What a rank does at each moment of a step, so that the parts of a step add up to it.
#pragma once
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/comm/collective.h"

namespace isoshard {

/// Every moment of a step belongs to one of them. kCommunication: inside a call of the
/// communicator, or waiting for one; the others are what is left of their phase without it. kOther:
/// what belongs to no phase, such as reading the batch.
enum class StepPart : std::uint8_t { kForward, kBackward, kOptimizer, kCommunication, kOther };
inline constexpr std::size_t kNumStepParts = 5;

/// Of one step on one rank, in seconds.
struct StepTimes {
  double total = 0;
  std::array<double, kNumStepParts> parts{};
  /// Communication, by the part that it interrupted.
  std::array<double, kNumStepParts> communication_in{};
  /// Of the other parts, while a transfer of this rank was on its way: what it did not wait for.
  double hidden = 0;
  [[nodiscard]] double of(StepPart part) const noexcept {
    return parts[static_cast<std::size_t>(part)];
  }
};

/// A stretch of a step on one rank, in seconds of a clock that the ranks of a machine share.
struct StepSpan {
  double begin = 0, end = 0;
  StepPart part = StepPart::kOther;
  Purpose purpose = Purpose::kUnspecified;  ///< of communication
};
/// Of a step's spans so many are kept.
inline constexpr std::size_t kMostSpans = 20'000;
/// The times of so many calls are kept for medians.
inline constexpr std::size_t kMostCalls = 20'000;

/// Calls of one purpose on one rank. A call's bytes are those of its longest buffer: the input of
/// all-reduce, reduce-scatter, all-to-all, send and broadcast, the output of all-gather. What a
/// send moves is counted by the sender alone.
struct PurposeTotals {
  std::int64_t calls = 0, bytes = 0;
  double seconds = 0;
  /// While a transfer that a call of this purpose had left on its way, and the rank did something
  /// else. Where several purposes have transfers on their way, that of the last call counts.
  double hidden = 0;
  double median = 0;  ///< of a call, its waits included; of the first kMostCalls calls of the rank
};

/// The middle value, or the mean of the two in the middle; 0 of none.
[[nodiscard]] double median_of(std::vector<double> values);

/// By purpose.
using PurposeTimes = std::array<PurposeTotals, kNumPurposes>;

/// Guarantees   the parts of a step add up to its total but for rounding, as one clock is read at
///              each change of part.
///
///     clock.begin_step();
///     const StepPart before = clock.enter(StepPart::kForward);
///     ...
///     clock.enter(before);
///     const StepTimes times = clock.end_step();
class StepClock {
 public:
  StepClock() {
    spans_.reserve(kMostSpans);
    calls_.reserve(kMostCalls);
  }
  /// `wait` returns when all that was begun is done. It is called at the begin and the end of a
  /// step and where forward, backward and optimizer change, before the clock is read: what a device
  /// has only been asked for then belongs to the part that asked. Not around communication, which a
  /// part may overlap: a call that waits for the device counts that time, too. Without it a part
  /// ends when the calling thread leaves it.
  void set_wait(std::function<void()> wait) { wait_ = std::move(wait); }
  /// From now on time counts, as kOther. Calls before it count nowhere.
  void begin_step() noexcept;
  /// `purpose`: of communication. Returns the part until now.
  StepPart enter(StepPart part, Purpose purpose = Purpose::kUnspecified) noexcept;
  [[nodiscard]] StepTimes end_step() noexcept;
  /// After a wait: whether a transfer is still on its way, of the purpose of the last call.
  void set_under_way(bool is_under_way) noexcept { is_under_way_ = is_under_way; }
  /// Whether a transfer is on its way from now on, while the rank does something else; and the
  /// purpose of the last call.
  void set_under_way(bool is_under_way, Purpose purpose) noexcept {
    is_under_way_ = is_under_way;
    under_way_purpose_ = purpose;
  }
  /// Of the step that is under way, or of the last one, in their order.
  [[nodiscard]] const std::vector<StepSpan>& spans() const noexcept { return spans_; }

  /// `interrupted`: the part that the call interrupted. Outside of a step nothing is counted.
  /// Returns the number of the call, for add_wait.
  std::size_t add_call(Purpose purpose, std::int64_t bytes, StepPart interrupted,
                       double seconds) noexcept;
  void add_wait(std::size_t call, Purpose purpose, StepPart interrupted, double seconds) noexcept;
  [[nodiscard]] PurposeTimes purposes() const;
  void clear_purposes() noexcept {
    purposes_ = {};
    calls_.clear();
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct TimedCall {
    Purpose purpose = Purpose::kUnspecified;
    float seconds = 0;
  };
  void wait_for_device() const noexcept;
  void keep_span(Clock::time_point begin, Clock::time_point end) noexcept;

  std::function<void()> wait_;
  bool is_running_ = false, is_under_way_ = false;
  Clock::time_point start_, last_;
  StepPart part_ = StepPart::kOther;
  Purpose purpose_ = Purpose::kUnspecified;
  std::vector<StepSpan> spans_;
  StepTimes times_;
  Purpose under_way_purpose_ = Purpose::kUnspecified;
  PurposeTimes purposes_{};
  std::vector<TimedCall> calls_;
};

/// Is in a part while it lives, then in the one before.
class StepScope {
 public:
  StepScope(StepClock& clock, StepPart part, Purpose purpose = Purpose::kUnspecified) noexcept
      : clock_(clock), before_(clock.enter(part, purpose)) {}
  ~StepScope() { clock_.enter(before_); }
  StepScope(const StepScope&) = delete;
  StepScope& operator=(const StepScope&) = delete;
  [[nodiscard]] StepPart before() const noexcept { return before_; }

 private:
  StepClock& clock_;
  StepPart before_;
};

}  // namespace isoshard
