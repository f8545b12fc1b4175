// SPDX-License-Identifier: Apache-2.0
/// A mesh and ranks of it in words, as reports, errors and goldens write it.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/mesh/mesh.h"

namespace isoshard {

/// "dp 3 x tp 2", from the slowest axis to the fastest; `without_axes` for a mesh without axes.
[[nodiscard]] std::string words_of(std::span<const AxisDegree> axes,
                                   std::string_view without_axes = "one rank");

/// "0, 1, 4 to 7" of numbers that ascend.
[[nodiscard]] std::string ranges_in_words(const std::vector<int>& numbers);
/// "rank 3", "ranks 0, 1, 4 to 7" of ranks that ascend.
[[nodiscard]] std::string words_of_ranks(const std::vector<int>& ranks);
/// " on rank 3", " on ranks 0, 1", " on all ranks"; empty for no rank.
[[nodiscard]] std::string on_ranks(const std::vector<int>& ranks, const MeshShape& mesh);

}  // namespace isoshard
