// SPDX-License-Identifier: Apache-2.0
/// A result as JSON: the fields of the tool of docs/internals/seeds.md, section 4, and those that
/// it leaves out (docs/reference/bench.schema.json).
#pragma once
#include <nlohmann/json_fwd.hpp>

#include "suite/bench/bench.h"

namespace isoshard {

/// The settings, as the flags are called.
[[nodiscard]] nlohmann::ordered_json bench_config_json(const BenchPlan& plan);
/// Requires   at least one run.
[[nodiscard]] nlohmann::ordered_json bench_json(const BenchResult& result);
/// What makes two runs comparable: CPU, its features, cores.
[[nodiscard]] nlohmann::ordered_json machine_json();

}  // namespace isoshard
