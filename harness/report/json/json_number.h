// SPDX-License-Identifier: Apache-2.0
/// Numbers in reports.
#pragma once
#include <cmath>
#include <nlohmann/json.hpp>

namespace isoshard {

/// A NaN or an infinity, which JSON does not have, is the string "nan", "inf" or "-inf".
[[nodiscard]] inline nlohmann::json json_number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

}  // namespace isoshard
