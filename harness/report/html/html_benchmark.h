// SPDX-License-Identifier: Apache-2.0
/// What was timed: where a step goes, its collectives, a timeline; internal to html.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace isoshard::html {

/// One item of `benchmarks`, without its title: of a timed configuration tables and pictures, of
/// anything else its lines.
[[nodiscard]] std::string benchmark_of(const nlohmann::json& item);

}  // namespace isoshard::html
