// SPDX-License-Identifier: Apache-2.0
/// Worlds of forked processes: starts and watches ranks, collects their results, and reports what
/// went wrong.
#pragma once
#include <functional>
#include <memory>

#include "harness/world/launcher.h"
#include "harness/world/world.h"

namespace isoshard {

/// A running world. Several worlds may run at once.
///
/// Requires     the calling process is single-threaded (fork), and at::set_num_threads(1) was
///              called before the first op.
/// Guarantees   every rank is a fresh process forked from the caller; when wait() has returned (or
///              the object is destroyed) no process of the world is left, nor one that a rank
///              started (a leaked process is killed and named, and the report is not ok); ranks die
///              with the controller (parent-death signal). The caller adopts orphans from then on
///              (prctl(2), subreaper).
/// Errors       UsageError for a transport that does not cross processes; InfrastructureError that
/// names the limit if processes, descriptors or shared memory
///              cannot be had; UsageError for a size outside 1..16 or a caller with several
///              threads.
///
///     ForkedWorld world({.size = 2, .name = "sum"}, [](Rank& rank) { ... });
///     WorldReport report = world.wait();
class ForkedWorld {
 public:
  using Body = Launcher::Body;
  ForkedWorld(WorldOptions options, Body body);
  ForkedWorld(ForkedWorld&&) noexcept;
  ForkedWorld& operator=(ForkedWorld&&) noexcept;
  ~ForkedWorld();
  /// Waits for all ranks to end, serving every other running world of this process meanwhile.
  /// Called once.
  [[nodiscard]] WorldReport wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Runs one world to its end.
[[nodiscard]] WorldReport run_forked(WorldOptions options, ForkedWorld::Body body);

/// Ranks are processes forked from the caller: what it had in memory, they have.
class ForkedLauncher final : public Launcher {
 public:
  [[nodiscard]] std::string_view name() const noexcept override { return "forked"; }
  [[nodiscard]] bool shares_memory() const noexcept override { return true; }
  /// Errors   as ForkedWorld.
  [[nodiscard]] std::unique_ptr<RunningWorld> launch(WorldOptions options, Body body) override;
};

[[nodiscard]] Launcher& forked_launcher() noexcept;

/// The launcher of everything that does not ask for another one: forked_launcher(), or the one that
/// a program has set at its start. `launcher` must live until the program ends.
[[nodiscard]] Launcher& default_launcher() noexcept;
void set_default_launcher(Launcher& launcher) noexcept;

/// Worlds may be forked although these threads run: those of MPI, which hold nothing that a rank
/// needs. Called when they have started, before any other thread.
void allow_threads_of_now() noexcept;

}  // namespace isoshard
