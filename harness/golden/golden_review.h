// SPDX-License-Identifier: Apache-2.0
/// The text that a person reads before accepting a pending golden.
#pragma once
#include <optional>
#include <string>

#include "harness/golden/golden_store.h"

namespace isoshard {

/// The golden that a pending one would replace.
struct AcceptedGolden {
  Golden golden;
  GoldenEntry entry;
};

/// A paragraph: where both come from, settings that differ, how many lines change, the first change
/// with both values and its ulps, the largest one, what the pending one asks less of than the old
/// one (limits that grow, projections, copies and equal tensors that are lost), the parity check,
/// and why it would be refused.
[[nodiscard]] std::string review_text(const std::optional<AcceptedGolden>& old,
                                      const Golden& pending);

}  // namespace isoshard
