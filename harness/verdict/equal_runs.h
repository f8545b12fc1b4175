// SPDX-License-Identifier: Apache-2.0
/// Whether two runs recorded the same, bit by bit, without the bytes of either.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "harness/trace/trace.h"

namespace isoshard {

struct RunEquality {
  /// Names of records that are equal on all ranks; a rank's summands ("X.partial") are not counted.
  std::int64_t tensors = 0;
  std::string difference;  ///< the first one in words; empty if the runs are equal
  [[nodiscard]] bool holds() const noexcept { return difference.empty() && tensors > 0; }
};

/// Compares rank by rank: the same records, and of each the same dtype, gradient scale, and parts
/// with the same digests of their bytes. Execution order may differ, and masks that backward drew
/// again are held to the first ones where `expected` has none. Bits decide: zeros of different sign
/// are different, NaNs of the same bits are equal.
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
