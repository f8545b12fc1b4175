// SPDX-License-Identifier: Apache-2.0
/// The one way to run a world and record what its ranks compute.
#pragma once
#include <memory>

#include "harness/run/run_spec.h"
#include "harness/run/trace_store.h"
#include "harness/run/world_run.h"
#include "harness/recorder/recorder.h"
#include "harness/trace/reference.h"

namespace isoshard {

/// What is done with the tensors that are recorded.
struct Recording {
  /// Compared with on the spot, on each rank; nullptr: nothing is compared. Must outlive the run.
  const Reference* reference = nullptr;
  Keep keep = Keep::kEverything;
  RunPurpose purpose = RunPurpose::kJudged;
};

/// A recorded run under way: the caller does something else meanwhile. Several may run at once.
class RunningRecord {
 public:
  /// Errors   UsageError for a spec that says not what a rank does; as make_trace_store and
  ///          Launcher::launch.
  RunningRecord(Launcher& launcher, RunSpec spec, const Recording& recording);
  /// Called once.
  /// Errors   InfrastructureError that says how a rank failed.
  [[nodiscard]] Trace wait();

 private:
  Trace trace_;  ///< without ranks until they have ended
  std::unique_ptr<TraceStore> store_;
  WorldRun run_;
};

/// Runs the world to its end.
/// Ranks    called by the controller.
/// Errors   as RunningRecord.
///
///     const Trace trace = record(forked_launcher(), spec, {.reference = &reference});
[[nodiscard]] Trace record(Launcher& launcher, const RunSpec& spec, const Recording& recording);

}  // namespace isoshard
