// SPDX-License-Identifier: Apache-2.0
/// The collectives that ranks really make, step by step: what a run records of them.
#pragma once
#include <map>
#include <vector>

#include "core/mesh/mesh.h"
#include "core/observe/sink.h"
#include "harness/world/world.h"

namespace isoshard {

/// Calls of one rank on groups of two ranks and more. Lies below a fault that is put on the
/// communicator, so it sees what is called, not what was asked for.
class CollectiveLog {
 public:
  void add(const CollectiveCall& call) { calls_[call.axis].push_back(call); }
  void clear() { calls_.clear(); }
  /// Records the calls since clear(), axis by axis (harness/trace/collective_calls.h), as what only
  /// this rank has.
  void record(Sink& sink, const MeshShape& mesh, int rank) const;

 private:
  std::map<Axis, std::vector<CollectiveCall>> calls_;
};

/// Logs a rank's calls into `logs[rank]`, then does what `decorate` does (which may be empty).
/// Requires   a log for each rank.
[[nodiscard]] CommDecorator logged(CommDecorator decorate,
                                   std::shared_ptr<std::vector<CollectiveLog>> logs);

}  // namespace isoshard
