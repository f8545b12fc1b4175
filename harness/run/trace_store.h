// SPDX-License-Identifier: Apache-2.0
/// Where the bytes that ranks keep live, and how the controller gets them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "harness/trace/trace.h"
#include "harness/world/launcher.h"

namespace isoshard {

/// The kept bytes of one run, by rank of its mesh.
///
/// Requires     made by the controller before the ranks start.
///
///     const auto store = make_trace_store(launcher, mesh.world_size(), bytes, Sharing::kOwn);
///     recording.arena = store->of_rank(rank);          // on the rank
///     trace.ranks[rank].arena = store->kept_by(rank);  // in the controller, after the ranks' end
class TraceStore {
 public:
  virtual ~TraceStore() = default;
  /// What the rank appends to.
  /// Ranks   local, on the rank.
  [[nodiscard]] virtual std::shared_ptr<Arena> of_rank(int rank) = 0;
  /// What the rank has appended, read-only from here on.
  /// Ranks    called by the controller, after the rank's end.
  /// Errors   InfrastructureError if the rank has damaged it.
  [[nodiscard]] virtual std::shared_ptr<const Arena> kept_by(int rank) = 0;
};

enum class Sharing : std::uint8_t {
  kOwn,
  kTogether,    ///< the ranks run in one process, and copies that they hold are kept once
  kOnEachHost,  ///< one rank, which each host runs (WorldOptions::on_each_host)
};

/// A store that fits the launcher: in shared memory; or where several processes judge together
/// (Launcher::peers), one that holds what each rank has kept once on each host, in memory that the
/// host's processes share. What other hosts lack is sent to them in pieces of 4 MiB: beside the
/// kept bytes a host holds two pieces. Of kOnEachHost nothing is sent but a digest, unless it is
/// another one on some host: this then gets the bytes of process 0's.
/// `bytes` are reserved for each rank, and those that are not used cost nothing.
/// Ranks    with peers, kept_by is collective over them, in the order of ranks.
/// Errors   NotBuiltError for a launcher with neither; as Arena.
[[nodiscard]] std::unique_ptr<TraceStore> make_trace_store(Launcher& launcher, int num_ranks,
                                                           std::size_t bytes, Sharing sharing);

/// Of a run that keeps nothing.
[[nodiscard]] std::unique_ptr<TraceStore> no_trace_store();

}  // namespace isoshard
