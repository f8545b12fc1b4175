// SPDX-License-Identifier: Apache-2.0
#include "harness/trace/sampled.h"

#include <fmt/format.h>

#include <numeric>

#include "harness/stats/stats.h"

namespace isoshard {

std::vector<std::int64_t> sampled_positions(std::string_view run, int rank, const RecordKey& key,
                                            std::int64_t numel) {
  constexpr std::int64_t kRuns = 16, kLength = 32;
  std::vector<std::int64_t> positions;
  if (numel <= kRuns * kLength) {
    positions.resize(static_cast<std::size_t>(numel));
    std::iota(positions.begin(), positions.end(), 0);
    return positions;
  }
  for (std::int64_t i = 0; i < kRuns; ++i) {
    const std::string text = fmt::format("{}/{}/{}/{}/{}/{}/{}", run, rank, key.step,
                                         name_of(key.kind), key.name, key.call, i);
    const std::uint64_t hash =
        digest_of(reinterpret_cast<const std::byte*>(text.data()), text.size());
    const std::int64_t begin = numel / kRuns * i;
    const auto room = static_cast<std::uint64_t>(numel / kRuns - kLength + 1);
    const std::int64_t first = begin + static_cast<std::int64_t>(hash % room);
    for (std::int64_t p = first; p < first + kLength; ++p) positions.push_back(p);
  }
  return positions;
}

}  // namespace isoshard
