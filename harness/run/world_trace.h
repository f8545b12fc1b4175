// SPDX-License-Identifier: Apache-2.0
/// From the ranks' messages to one trace: the last step of every recorded world.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "harness/trace/trace.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {

/// The trace memory of each rank, by rank; nullptr where nothing is kept.
using Arenas = std::vector<std::shared_ptr<Arena>>;

/// One arena a rank, made before the fork so that ranks and controller share it.   Errors   as
/// Arena.
[[nodiscard]] Arenas make_arenas(int num_ranks, std::size_t bytes, const std::string& name);

/// Seals the arenas and gives each to its rank.   Errors   InfrastructureError if there are not as
/// many ranks as arenas.
void hand_over(const Arenas& arenas, Trace& trace);

/// Adds to `trace`, which has its names and mesh, what each rank posted: RankTrace::serialize() of
/// its records.
/// Errors   as require_ok; InfrastructureError if a message is cut off.
[[nodiscard]] Trace trace_of_world(Trace trace, const WorldReport& report, const Arenas& arenas);

}  // namespace isoshard
