// SPDX-License-Identifier: Apache-2.0
/// Hooks for a test framework in forked worlds.
#pragma once
#include <functional>

#include "harness/world/forked/forked_world.h"

namespace isoshard {

struct WorldHooks {
  /// In the controller, once, before the first fork.
  std::function<void()> before_first_world;
  /// In the controller, before each fork.
  std::function<void(int size)> before_world;
  /// In each rank, before anything that the caller gave the world (decorator, body) runs.
  std::function<void()> rank_begins;
  /// In each rank whose body returned.
  std::function<void()> rank_returned;
};

/// Replaces the hooks of this process. Without rank_begins, a failed expectation of GoogleTest
/// throws in a rank, because nobody would see it otherwise.
void set_world_hooks(WorldHooks hooks);

/// Sends a failed expectation to the controller (RankReport::failures).
/// Ranks    local; called in a rank of a forked world, from any thread, until the process ends.
/// Errors   UsageError outside of ranks.
void forward_failure(const ForwardedFailure& failure);

}  // namespace isoshard
