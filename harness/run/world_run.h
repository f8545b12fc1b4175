// SPDX-License-Identifier: Apache-2.0
/// Runs a world whose ranks each have a chain of sinks, and brings back what the ends of these
/// chains say: the ground that record() and training runs stand on.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "harness/run/run_spec.h"
#include "harness/world/launcher.h"

namespace isoshard {

/// What one process of the world does: that of one rank, or of all.
struct ProcessWork {
  /// The ends of the chains of its ranks, in rank order
  std::vector<std::shared_ptr<Sink>> ends;
  /// Gets the heads of the chains.
  std::function<void(Rank& process, std::span<Sink* const> heads)> body;
  /// What the controller is sent of its i-th rank; called in order, once each, after the body.
  std::function<std::vector<std::byte>(std::size_t i)> message;
};

enum class Processes : std::uint8_t { kOneARank, kOneForAll };

/// A world under way. Several may run at once.
///
/// Ranks    called by the controller; `make` is called in each process of the world.
class WorldRun {
 public:
  /// Errors   as Launcher::launch.
  WorldRun(Launcher& launcher, const RunSpec& spec, Processes processes,
           std::function<ProcessWork(int process)> make);
  /// The messages by rank of the mesh, when all ranks have ended. Called once.
  /// Errors   InfrastructureError that says how a rank failed, or that a message is cut off.
  [[nodiscard]] std::vector<std::vector<std::byte>> wait();

 private:
  std::unique_ptr<RunningWorld> world_;
};

}  // namespace isoshard
