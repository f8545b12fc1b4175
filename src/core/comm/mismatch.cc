// SPDX-License-Identifier: Apache-2.0
/// Comparison of announced calls.
#include "core/comm/mismatch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace isoshard {
namespace {

std::string differing_counts(std::span<const AnnouncedCall> calls) {
  const AnnouncedCall& first = calls.front();
  for (const AnnouncedCall& other : calls.subspan(1)) {
    if (std::ranges::equal(first.counts, other.counts)) continue;
    return fmt::format(
        "collectives differ: rank {} called {} with counts [{}], rank {} with counts [{}]; all "
        "ranks must give the same counts",
        first.world_rank, in_words(first.call), fmt::join(first.counts, ", "), other.world_rank,
        fmt::join(other.counts, ", "));
  }
  return {};
}

std::string differing_blocks(std::span<const AnnouncedCall> calls) {
  for (std::size_t from = 0; from < calls.size(); ++from) {
    for (std::size_t to = 0; to < calls.size(); ++to) {
      const std::int64_t sent = calls[from].counts[to];
      const std::int64_t expected = calls[to].output_counts[from];
      if (sent == expected) continue;
      return fmt::format(
          "collectives differ: in {} rank {} has {} elements for rank {}, which expects {} from it",
          in_words(calls[from].call), calls[from].world_rank, sent, calls[to].world_rank, expected);
    }
  }
  return {};
}

}  // namespace

std::string describe_mismatch(std::span<const AnnouncedCall> calls) {
  const AnnouncedCall& first = calls.front();
  for (const AnnouncedCall& other : calls.subspan(1)) {
    if (matches(first.call, other.call)) continue;
    return fmt::format(
        "collectives differ: rank {} called {}, rank {} called {}; all ranks of a group must make "
        "the same calls in the same order",
        first.world_rank, in_words(first.call), other.world_rank, in_words(other.call));
  }
  switch (first.call.op) {
    case CollectiveOp::kAllGatherUneven:
    case CollectiveOp::kReduceScatterUneven:
      return differing_counts(calls);
    case CollectiveOp::kAllToAll:
      return differing_blocks(calls);
    default:
      return {};
  }
}

std::string describe_mismatch_of_transfer(const AnnouncedCall& a, const AnnouncedCall& b) {
  const bool in_order = a.world_rank < b.world_rank;
  const AnnouncedCall& low = in_order ? a : b;
  const AnnouncedCall& high = in_order ? b : a;
  return fmt::format(
      "transfers differ: rank {} called {}, rank {} called {}; a send needs a recv of the same "
      "purpose, dtype and count on the other side",
      low.world_rank, in_words(low.call), high.world_rank, in_words(high.call));
}

}  // namespace isoshard
