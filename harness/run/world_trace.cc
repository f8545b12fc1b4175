// SPDX-License-Identifier: Apache-2.0
// Putting the ranks' traces together.
#include "harness/run/world_trace.h"

#include <fmt/format.h>

#include "core/base/error.h"

namespace isoshard {

Arenas make_arenas(int num_ranks, std::size_t bytes, const std::string& name) {
  Arenas arenas(static_cast<std::size_t>(num_ranks));
  for (auto& arena : arenas) arena = std::make_shared<Arena>(bytes, name);
  return arenas;
}

void hand_over(const Arenas& arenas, Trace& trace) {
  if (trace.ranks.size() != arenas.size()) {
    throw InfrastructureError(
        fmt::format("only {} of {} traces were sent", trace.ranks.size(), arenas.size()));
  }
  for (std::size_t r = 0; r < arenas.size(); ++r) {
    if (arenas[r] != nullptr) arenas[r]->seal();
    trace.ranks[r].arena = arenas[r];
  }
}

Trace trace_of_world(Trace trace, const WorldReport& report, const Arenas& arenas) {
  require_ok(report);
  for (const RankReport& rank : report.ranks)
    trace.ranks.push_back(RankTrace::deserialize(rank.result));
  hand_over(arenas, trace);
  return trace;
}

}  // namespace isoshard
