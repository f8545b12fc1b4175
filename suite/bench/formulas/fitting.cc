// SPDX-License-Identifier: Apache-2.0
// Searches over layers and lengths.
#include "suite/bench/formulas/fitting.h"

#include <fmt/format.h>

#include <algorithm>

#include "suite/bench/formulas/memory_model.h"

namespace isoshard {
namespace {

constexpr std::int64_t kShortSequence = 128;

/// The most layers that fit; 0 if not even the fewest do.
std::int64_t layers_that_fit(Case c, double bytes) {
  const std::int64_t fewest = std::max(1, c.degrees.pp * c.settings.nd.stages_per_rank);
  std::int64_t fits = 0, low = fewest, high = c.config.num_layers;
  while (low <= high) {
    const std::int64_t middle = low + (high - low) / 2;
    c.config.num_layers = middle;
    if (predicted_bytes_of_world(c) <= bytes) {
      fits = middle;
      low = middle + 1;
    } else {
      high = middle - 1;
    }
  }
  return fits;
}

}  // namespace

std::string in_gib(double bytes) {
  return fmt::format("{:.1f} GiB", bytes / 1073741824.0);
}

std::optional<Case> cut_to_fit(const Case& c, double bytes_of_world) {
  Case cut = c;
  cut.settings.nd.layers_per_stage.clear();
  for (const std::int64_t length : {c.seq_length, std::min(c.seq_length, kShortSequence)}) {
    cut.seq_length = length;
    cut.config.num_layers = c.config.num_layers;
    const std::int64_t layers = layers_that_fit(cut, bytes_of_world);
    if (layers == 0) continue;
    cut.config.num_layers = layers;
    return cut;
  }
  return std::nullopt;
}

}  // namespace isoshard
