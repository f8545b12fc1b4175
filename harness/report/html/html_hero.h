// SPDX-License-Identifier: Apache-2.0
/// The first screen: what broke, where, what to look at, how to repeat it; internal to html.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace isoshard::html {

/// For readers who have never seen a report.
[[nodiscard]] std::string hero_of(const nlohmann::json& report);
/// Command, versions, digests and settings.
[[nodiscard]] std::string provenance_of(const nlohmann::json& report);

}  // namespace isoshard::html
