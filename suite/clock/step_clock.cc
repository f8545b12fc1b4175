// SPDX-License-Identifier: Apache-2.0
// One clock, read at each change of part.
#include "suite/clock/step_clock.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace isoshard {
namespace {

double seconds_of(std::chrono::steady_clock::duration time) noexcept {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

// An error of the device shows at its next call.
void StepClock::wait_for_device() const noexcept {
  if (!wait_) return;
  try {
    wait_();
  } catch (...) {  // NOLINT: see above
  }
}

void StepClock::begin_step() noexcept {
  wait_for_device();
  times_ = {};
  part_ = StepPart::kOther;
  purpose_ = Purpose::kUnspecified;
  spans_.clear();
  is_running_ = true;
  start_ = last_ = Clock::now();
}

void StepClock::keep_span(Clock::time_point begin, Clock::time_point end) noexcept {
  const double from = seconds_of(begin.time_since_epoch()), to = seconds_of(end.time_since_epoch());
  if (!spans_.empty() && spans_.back().part == part_ && spans_.back().purpose == purpose_) {
    spans_.back().end = to;
  } else if (spans_.size() < kMostSpans) {
    spans_.push_back({from, to, part_, purpose_});
  }
}

StepPart StepClock::enter(StepPart part, Purpose purpose) noexcept {
  const bool is_change_of_work =
      part != part_ && part != StepPart::kCommunication && part_ != StepPart::kCommunication;
  if (is_running_ && is_change_of_work) wait_for_device();
  const Clock::time_point now = Clock::now();
  if (is_running_) {
    const double seconds = seconds_of(now - last_);
    times_.parts[static_cast<std::size_t>(part_)] += seconds;
    if (is_under_way_ && part_ != StepPart::kCommunication) {
      times_.hidden += seconds;
      purposes_[static_cast<std::size_t>(under_way_purpose_)].hidden += seconds;
    }
    keep_span(last_, now);
  }
  last_ = now;
  purpose_ = purpose;
  return std::exchange(part_, part);
}

StepTimes StepClock::end_step() noexcept {
  wait_for_device();
  enter(StepPart::kOther);
  is_running_ = false;
  times_.total = seconds_of(last_ - start_);
  return times_;
}

std::size_t StepClock::add_call(Purpose purpose, std::int64_t bytes, StepPart interrupted,
                                double seconds) noexcept {
  if (!is_running_) return kMostCalls;
  PurposeTotals& totals = purposes_[static_cast<std::size_t>(purpose)];
  ++totals.calls;
  totals.bytes += bytes;
  std::size_t call = kMostCalls;
  if (calls_.size() < kMostCalls) {
    call = calls_.size();
    calls_.push_back({purpose, 0});
  }
  add_wait(call, purpose, interrupted, seconds);
  return call;
}

void StepClock::add_wait(std::size_t call, Purpose purpose, StepPart interrupted,
                         double seconds) noexcept {
  if (!is_running_) return;
  if (call < calls_.size()) calls_[call].seconds += static_cast<float>(seconds);
  purposes_[static_cast<std::size_t>(purpose)].seconds += seconds;
  times_.communication_in[static_cast<std::size_t>(interrupted)] += seconds;
}

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

PurposeTimes StepClock::purposes() const {
  PurposeTimes times = purposes_;
  for (std::size_t p = 0; p < times.size(); ++p) {
    std::vector<double> seconds;
    for (const TimedCall& call : calls_)
      if (static_cast<std::size_t>(call.purpose) == p) seconds.push_back(call.seconds);
    times[p].median = median_of(std::move(seconds));
  }
  return times;
}

}  // namespace isoshard
