// SPDX-License-Identifier: Apache-2.0
/// A group of a world of processes, as each of its ranks knows it, and the numbers that name it.
#pragma once
#include <cstdint>
#include <vector>

#include "core/comm/journal.h"

namespace isoshard {

/// A group's index is unique in its world: the world is 0; another one has that of the rank that
/// leads it and of how many groups it led before. Groups and channels (one direction between two
/// ranks of a group) have ids made from it.
struct CommGroup {
  std::uint32_t index = 0;
  std::vector<int> world_ranks{};
  RankSet members{};  ///< the same ranks

  [[nodiscard]] static std::uint32_t index_of(std::uint32_t groups_led, int leader,
                                              int world_size) {
    return groups_led * static_cast<std::uint32_t>(world_size) + static_cast<std::uint32_t>(leader);
  }
  [[nodiscard]] std::uint64_t id() const noexcept {
    return world_ranks.size() == 1 ? kGroupOfOne : std::uint64_t{index} << 32;
  }
  [[nodiscard]] std::uint64_t channel_id(int from, int to) const noexcept {
    return std::uint64_t{index} << 32 | static_cast<std::uint64_t>(from + 1) << 16 |
           static_cast<std::uint64_t>(to + 1);
  }
};
static_assert(kMaxRanks < 1 << 16, "ranks in the id of a channel");

}  // namespace isoshard
