// SPDX-License-Identifier: Apache-2.0
/// Who starts the ranks of a world.
#pragma once
#include <functional>
#include <memory>
#include <string_view>

#include "harness/world/world.h"

namespace isoshard {

/// A world under way. One that is destroyed before its end is ended.
class RunningWorld {
 public:
  virtual ~RunningWorld() = default;
  /// Waits for all ranks to end. Called once.
  [[nodiscard]] virtual WorldReport wait() = 0;
};

/// Starts the ranks of worlds. There is one implementation, ForkedLauncher
/// (harness/world/forked/forked_world.h). Launchers that keep their ranks from world to world, or
/// that attach to ranks that somebody else has started, belong beside it.
///
/// Ranks   called by the controller; several worlds may run at once.
class Launcher {
 public:
  using Body = std::function<void(Rank&)>;
  virtual ~Launcher() = default;
  [[nodiscard]] virtual std::string_view name() const noexcept = 0;
  /// Whether ranks see shared memory that the controller made before the launch, and the
  /// controller what they wrote there.
  [[nodiscard]] virtual bool shares_memory() const noexcept = 0;
  /// Every rank runs `body`.
  [[nodiscard]] virtual std::unique_ptr<RunningWorld> launch(WorldOptions options, Body body) = 0;
};

}  // namespace isoshard
