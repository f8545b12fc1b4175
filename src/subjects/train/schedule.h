// SPDX-License-Identifier: Apache-2.0
/// When, within a step, gradients are cleared and when their average over dp is started.
#pragma once

namespace isoshard {

/// One micro-batch of a run: the `index`-th of `count`, in step `step`.
struct MicroBatchPlace {
  int step = 0, index = 0, count = 1;
  [[nodiscard]] bool is_last() const noexcept { return index + 1 == count; }
};

/// A seam: a faulty test double may stand in from outside. The class itself is the right schedule.
///
/// Guarantees   the base class clears once a step, before its first micro-batch, and reduces once,
///              in the backward of its last one.
/// Ranks        local; equal on every rank, as what it starts is collective.
class Schedule {
 public:
  virtual ~Schedule() = default;
  [[nodiscard]] virtual bool clears_gradients_before(const MicroBatchPlace& place) {
    return place.index == 0;
  }
  /// A reduction that starts before the last micro-batch is finished before the next one adds to
  /// the gradients.
  [[nodiscard]] virtual bool reduces_gradients_in(const MicroBatchPlace& place) {
    return place.is_last();
  }
};

}  // namespace isoshard
