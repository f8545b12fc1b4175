// SPDX-License-Identifier: Apache-2.0
/// Who starts the ranks of a world.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
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

/// Processes that go the same way through a program, each with a launcher of its own: they start
/// the same worlds in the same order, and get the same reports and traces. One of them, 0, reports.
///
/// Ranks   every function is collective over them, and called in the same order by all.
class Peers {
 public:
  virtual ~Peers() = default;
  /// This process's number, from 0.
  [[nodiscard]] virtual int index() const noexcept = 0;
  [[nodiscard]] virtual int count() const noexcept = 0;
  /// Fills `bytes`, as long on all, with those of process `from`.
  virtual void broadcast(std::span<std::byte> bytes, int from) = 0;
  [[nodiscard]] virtual std::int64_t sum(std::int64_t own) = 0;
};

/// Starts the ranks of worlds. ForkedLauncher
/// (harness/world/forked/forked_world.h) forks them; with AttachedLauncher
/// (harness/world/attached/attached_launcher.h) they are processes that somebody else has started.
/// Launchers that keep their ranks from world to world belong beside them.
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
  /// The processes that judge together with this one; null: this process judges alone.
  [[nodiscard]] virtual Peers* peers() noexcept { return nullptr; }
  /// Every rank runs `body`.
  [[nodiscard]] virtual std::unique_ptr<RunningWorld> launch(WorldOptions options, Body body) = 0;
};

/// The sum of all processes that judge together: how often something happened on any rank.
[[nodiscard]] inline std::int64_t sum_over_peers(Launcher& launcher, std::int64_t own) {
  Peers* const peers = launcher.peers();
  return peers == nullptr ? own : peers->sum(own);
}

}  // namespace isoshard
