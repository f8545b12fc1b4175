// SPDX-License-Identifier: Apache-2.0
/// What ranks hold of one tensor.
#pragma once
#include <vector>

#include "harness/trace/trace.h"

namespace isoshard::detail {

/// One rank's record of the tensor.
struct Held {
  const RankTrace* rank = nullptr;
  const Record* record = nullptr;
};

/// Which summand of a sum over ranks a rank holds: its coordinates along the axes of the sum. Ranks
/// with the same ones hold copies.
[[nodiscard]] std::vector<int> summand_of(const Layout& layout, const MeshShape& mesh, int rank);

}  // namespace isoshard::detail
