// SPDX-License-Identifier: Apache-2.0
/// Sizes that no run has, however much memory there is: they are slips, and are refused as such.
#pragma once
#include <cstdint>

namespace isoshard {

inline constexpr std::int64_t kMaxLayers = 100'000;

}  // namespace isoshard
