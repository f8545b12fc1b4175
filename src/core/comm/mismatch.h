// SPDX-License-Identifier: Apache-2.0
/// How calls of ranks differ, in the words that every backend reports.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "core/comm/collective.h"

namespace isoshard {

/// What one rank says about its call. `world_rank` is for the words.
struct AnnouncedCall {
  int world_rank = 0;
  CollectiveCall call{};
  std::span<const std::int64_t> counts{};         ///< uneven: of the blocks; all_to_all: sent
  std::span<const std::int64_t> output_counts{};  ///< all_to_all: expected from each rank
};

/// Compares all with the group's first, so that all ranks find the same. Empty if the calls belong
/// together. `calls` is in the order of the group's ranks.
[[nodiscard]] std::string describe_mismatch(std::span<const AnnouncedCall> calls);

/// A send and a recv that do not fit; the lower rank is named first.
[[nodiscard]] std::string describe_mismatch_of_transfer(const AnnouncedCall& a,
                                                        const AnnouncedCall& b);

}  // namespace isoshard
