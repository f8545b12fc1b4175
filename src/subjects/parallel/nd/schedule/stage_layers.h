// SPDX-License-Identifier: Apache-2.0
/// How many layers each stage of a pipeline has.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace isoshard {

/// By stage: `given`, or if that is empty ceil(layers / stages) for the first layers % stages
/// stages and one less for the others.
///
/// Errors   UsageError with the numbers: fewer layers than stages, another number of counts than
///          stages, a count below 1, a sum that is not the number of layers.
[[nodiscard]] std::vector<std::int64_t> layers_of_stages(std::int64_t num_layers, int num_stages,
                                                         std::span<const std::int64_t> given = {});

/// "3,2,2,1" as counts; of nothing none.   Errors   UsageError for what is no list of numbers.
[[nodiscard]] std::vector<std::int64_t> parse_layers_per_stage(std::string_view text);
/// The inverse.
[[nodiscard]] std::string layers_per_stage_text(std::span<const std::int64_t> counts);

}  // namespace isoshard
