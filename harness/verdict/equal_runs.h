// SPDX-License-Identifier: Apache-2.0
/// Whether two runs recorded the same, bit by bit, without the bytes of either.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "harness/trace/trace.h"

namespace isoshard {

/// Where two runs part.
struct RunDifference {
  /// Which is empty where not single records differ, but the ranks that are there.
  std::optional<RecordKey> key = {};
  int rank = -1;           ///< -1: no single one
  std::int64_t order = 0;  ///< of the record in its rank's execution
  std::string what = {};   ///< "differs", "was not recorded", "is fp64, not fp32"

  [[nodiscard]] std::string describe() const;  ///< "gradient of w (step 0) differs on rank 4"
};

struct RunEquality {
  /// Names of records that are equal on all ranks; a rank's summands are not counted.
  std::int64_t tensors = 0;
  /// The first one of all ranks by step, then by place in execution; nothing if the runs are equal.
  std::optional<RunDifference> first;
  std::string difference;  ///< the same in words; empty if the runs are equal
  [[nodiscard]] bool holds() const noexcept { return difference.empty() && tensors > 0; }
};

/// Compares rank by rank: the same records, and of each the same dtype, gradient scale, and parts
/// with the same digests of their bytes. Execution order may differ, and masks that backward drew
/// again are held to the first ones where `expected` has none. Bits decide: zeros of different sign
/// are different. Only a NaN equals any NaN, but for memory that nobody has written
/// (digest_of_part).
///
/// A digest has 64 bits: two different parts are taken for equal once in 2^64.
/// Requires   traces of the same mesh; kept bytes are not looked at.
[[nodiscard]] RunEquality equality_of(const Trace& expected, const Trace& actual);

/// Two ranks that hold the same part of one tensor with different bits.
struct UnequalCopies {
  RecordKey key;
  int first_rank = 0, second_rank = 0;
};
/// The first one that was recorded, by step and order; nothing if all copies are equal. Summands of
/// partial sums are no copies.
[[nodiscard]] std::optional<UnequalCopies> find_unequal_copies(const Trace& run);

}  // namespace isoshard
