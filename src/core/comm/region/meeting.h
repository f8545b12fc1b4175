// SPDX-License-Identifier: Apache-2.0
/// Where the ranks of a group wait for each other: short spin, then futex, until all came, an abort
/// or the deadline.
#pragma once
#include <cstdint>
#include <functional>

#include "core/comm/region/region.h"

namespace isoshard {

/// Returns when every rank of the group has called it as often as this rank. Every rank then sees
/// what the others wrote before the call. Now and then while it waits it calls `meanwhile`, which
/// must not wait, and says whether it should be called again soon.
///
/// Ranks    collective over the group; `world_rank` is the caller's.
/// Errors   CommError when the world is aborted, or when ranks wait for each other in different
///          groups (which aborts the world); TimeoutError on all ranks, naming who is missing in
///          what, at the world's deadline.
void meet(WorldRegion& region, GroupBlock& group, int world_rank,
          const std::function<bool()>& meanwhile = {});

/// Returns when the rank's bell is no longer at `rung`; may also return for no reason.
///
/// Ranks    local.
/// Errors   none; the waiting rank looks itself whether the world is aborted, which this does where
///          meet() would.
void wait_for_bell(WorldRegion& region, int world_rank, std::uint32_t rung);

}  // namespace isoshard
