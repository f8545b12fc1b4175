// SPDX-License-Identifier: Apache-2.0
// Searches over layers, lengths and degrees.
#include "suite/bench/formulas/fitting.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "core/base/error.h"
#include "subjects/registry/subject_spec.h"
#include "suite/bench/formulas/memory_model.h"

namespace isoshard {
namespace {

constexpr std::int64_t kShortSequence = 128;

struct Unit {
  std::string_view name;
  double bytes;
};
constexpr Unit kUnits[] = {{"KiB", 1024.0},
                           {"MiB", 1048576.0},
                           {"GiB", 1073741824.0},
                           {"TiB", 1099511627776.0},
                           {"KB", 1e3},
                           {"MB", 1e6},
                           {"GB", 1e9},
                           {"TB", 1e12},
                           {"B", 1},
                           {"", 1}};

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

double parse_bytes(std::string_view text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view rest(end, static_cast<std::size_t>(text.data() + text.size() - end));
  if (error == std::errc() && number > 0) {
    for (const Unit& unit : kUnits) {
      if (rest == unit.name) return number * unit.bytes;
    }
  }
  throw UsageError(
      fmt::format("memory must be a number with a unit such as 80GB or 74.5GiB, got {}", text));
}

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

std::vector<Degrees> degrees_of(std::string_view subject, int ranks) {
  const SubjectSpec& spec = subject_spec(subject);
  std::vector<Degrees> result;
  for (int pp = 1; pp <= ranks; ++pp) {
    if (ranks % pp != 0 || (pp > 1 && !spec.has(Axis::kPp))) continue;
    for (int tp = 1; tp <= ranks / pp; ++tp) {
      if ((ranks / pp) % tp != 0 || (tp > 1 && !spec.has(Axis::kTp))) continue;
      result.push_back({.pp = pp, .dp = ranks / pp / tp, .tp = tp});
    }
  }
  return result;
}

}  // namespace isoshard
