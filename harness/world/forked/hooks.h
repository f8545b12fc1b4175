// SPDX-License-Identifier: Apache-2.0
/// Hooks for a test framework in forked worlds.
#pragma once
#include <functional>

#include "harness/world/forked/forked_world.h"

namespace isoshard {

struct WorldHooks {
  /// In the controller, once, before the first fork.
  std::function<void()> before_first_world;
  /// In each rank, instead of calling the body.
  std::function<void(Rank&, const ForkedWorld::Body&)> run_body;
  /// In the controller, before each fork.
  std::function<void(int size)> before_world;
};

/// Replaces the hooks of this process.
void set_world_hooks(WorldHooks hooks);

/// Sends a failed expectation to the controller (RankReport::failures). `rank` is the object that a
/// forked world gave to its body.
/// Ranks   local; from any thread.
void forward_failure(Rank& rank, const ForwardedFailure& failure);

}  // namespace isoshard
