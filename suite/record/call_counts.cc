// SPDX-License-Identifier: Apache-2.0
// The counting communicator.
#include "suite/record/call_counts.h"

#include <utility>

#include "suite/record/observed_comm.h"

namespace isoshard {

CountedRank::CountedRank(Rank& rank, std::shared_ptr<CallCounts> counts)
    : rank_(&rank),
      comm_(observed(rank.comm(), [counts = std::move(counts)](const CollectiveCall& call, int) {
        ++(*counts)[{call.op, call.purpose, call.axis}];
      })) {}
CountedRank::~CountedRank() = default;

std::int64_t count_of(const CallCounts& counts, Purpose purpose) {
  std::int64_t total = 0;
  for (const auto& [key, count] : counts) total += key.purpose == purpose ? count : 0;
  return total;
}

}  // namespace isoshard
