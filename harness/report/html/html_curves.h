// SPDX-License-Identifier: Apache-2.0
/// Loss curves and how far they are from their reference; internal to html.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace isoshard::html {

/// The loss of every run, and below it each run's distance from the first one beside what is
/// allowed of it; "" where no curve has points.
[[nodiscard]] std::string curves_of(const nlohmann::json& report);

}  // namespace isoshard::html
