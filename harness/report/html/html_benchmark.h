// SPDX-License-Identifier: Apache-2.0
/// What was timed: where a step goes, its collectives, a timeline; internal to html.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace isoshard::html {

/// One item of `benchmarks`, without its title: of a timed configuration tables and pictures, of
/// anything else its lines.
[[nodiscard]] std::string benchmark_of(const nlohmann::json& item);

/// A table of collectives by purpose, of rows as results_*.json has them (docs/reference/bench.md);
/// empty where none took time.
[[nodiscard]] std::string collectives_of(const nlohmann::json& rows, const std::string& caption);

}  // namespace isoshard::html
