// SPDX-License-Identifier: Apache-2.0
// Counts of layers, given or nearly equal.
#include "subjects/parallel/nd/schedule/stage_layers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <utility>

#include "core/base/error.h"

namespace isoshard {

std::vector<std::int64_t> layers_of_stages(std::int64_t num_layers, int num_stages,
                                           std::span<const std::int64_t> given) {
  if (num_stages < 1 || num_layers < num_stages) {
    throw UsageError(
        fmt::format("the number of stages must be from 1 to the {} layers of the model, got {}",
                    num_layers, num_stages));
  }
  if (!given.empty()) {
    for (const std::int64_t count : given) {
      if (count >= 1 && count <= num_layers) continue;
      throw UsageError(
          fmt::format("the layers per stage must be from 1 to the {} of the model, got {} in {}",
                      num_layers, count, layers_per_stage_text(given)));
    }
    const std::int64_t sum = std::accumulate(given.begin(), given.end(), std::int64_t{0});
    if (std::cmp_not_equal(given.size(), num_stages) || sum != num_layers) {
      throw UsageError(
          fmt::format("the layers per stage must be {} numbers whose sum is {}, one "
                      "for each stage, got {} with the sum {}",
                      num_stages, num_layers, layers_per_stage_text(given), sum));
    }
    return {given.begin(), given.end()};
  }
  std::vector<std::int64_t> counts;
  for (int stage = 0; stage < num_stages; ++stage)
    counts.push_back(num_layers / num_stages + (stage < num_layers % num_stages ? 1 : 0));
  return counts;
}

std::vector<std::int64_t> parse_layers_per_stage(std::string_view text) {
  std::vector<std::int64_t> counts;
  const char* next = text.data();
  const char* const end = next + text.size();
  while (next != end) {
    const auto [stop, error] = std::from_chars(next, end, counts.emplace_back());
    const bool goes_on = stop != end && *stop == ',' && stop + 1 != end;
    if (error != std::errc() || (stop != end && !goes_on)) {
      throw UsageError(fmt::format(
          "the layers per stage must be numbers with commas between them, like 3,2,2,1, got '{}'",
          text));
    }
    next = goes_on ? stop + 1 : stop;
  }
  return counts;
}

std::string layers_per_stage_text(std::span<const std::int64_t> counts) {
  return fmt::format("{}", fmt::join(counts, ","));
}

}  // namespace isoshard
