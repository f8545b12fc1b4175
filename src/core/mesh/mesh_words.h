// SPDX-License-Identifier: Apache-2.0
/// A mesh in words, as reports, errors and goldens write it.
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "core/mesh/mesh.h"

namespace isoshard {

/// "dp 3 x tp 2", from the slowest axis to the fastest; `without_axes` for a mesh without axes.
[[nodiscard]] std::string words_of(std::span<const AxisDegree> axes,
                                   std::string_view without_axes = "one rank");

}  // namespace isoshard
