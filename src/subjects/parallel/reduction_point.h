// SPDX-License-Identifier: Apache-2.0
/// How ranks add their tensors at one kind of place, as plain data.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/dtype.h"
#include "core/comm/communicator.h"

namespace isoshard {

/// Values are multiplied with a number or divided by it, and rounded. 1: they stay as they are.
struct ReductionFactor {
  double value = 1;
  bool divides = false;
};

/// How ranks add (or take the maximum) at one kind of place. The sum is made over the ranks of one
/// group; a group of one adds nothing and rounds nothing.
struct ReductionPoint {
  bool is_made = true;                    ///< false: every rank goes on with its own tensor
  Reduction reduction = Reduction::kSum;  ///< kSum, kAvg or kMax
  ReductionOrder order = ReductionOrder::kOrdered;
  /// What values are rounded to before they are added; none: their own dtype
  std::optional<Dtype> dtype;
  /// kOrdered: to that dtype after each addition, not once at the end
  bool rounds_every_add = false;
  /// kOrdered: group ranks in the order of adding; empty: 0, 1, 2, ...
  std::vector<int> addends;
  /// Of every rank's values before they are added, and of the sum, both in the dtype in which
  /// values are added
  ReductionFactor before, after;
  /// kRing: sizes of the group ranks' chunks; empty: equal ones, as docs/internals/reduction.md
  /// says
  std::vector<std::int64_t> chunks;
};

/// Whether the sum of n equal values is such a value again.
[[nodiscard]] inline bool is_average(const ReductionPoint& point) noexcept {
  return point.reduction == Reduction::kAvg || point.before.value != 1 || point.after.value != 1;
}

}  // namespace isoshard
