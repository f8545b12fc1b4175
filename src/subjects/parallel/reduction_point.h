// SPDX-License-Identifier: Apache-2.0
/// How ranks add their tensors at one kind of place, as plain data.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/dtype.h"
#include "core/comm/communicator.h"

namespace isoshard {

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
  /// kRing: sizes of the group ranks' chunks; empty: equal ones, as docs/reduction.md says
  std::vector<std::int64_t> chunks;
};

}  // namespace isoshard
