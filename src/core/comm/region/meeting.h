// SPDX-License-Identifier: Apache-2.0
/// Where the ranks of a group wait for each other: short spin, then futex, until all came, an abort
/// or the deadline.
#pragma once
#include "core/comm/region/region.h"

namespace isoshard {

/// Returns when every rank of the group has called it as often as this rank. Every rank then sees
/// what the others wrote before the call.
///
/// Ranks    collective over the group; `world_rank` is the caller's.
/// Errors   CommError when the world is aborted, or when ranks wait for each other in different
///          groups (which aborts the world); TimeoutError on all ranks, naming who is missing in
///          what, at the world's deadline.
void meet(WorldRegion& region, GroupBlock& group, int world_rank);

}  // namespace isoshard
