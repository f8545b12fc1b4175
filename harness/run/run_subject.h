// SPDX-License-Identifier: Apache-2.0
/// Runs any Subject in a forked world with a Recorder on each rank: the way for an implementation
/// that is not one of ours.
#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/mesh/mesh.h"
#include "core/observe/sink.h"
#include "harness/trace/reference.h"
#include "harness/trace/trace.h"
#include "harness/world/batch.h"
#include "harness/world/rank.h"
#include "harness/world/subject.h"

namespace isoshard {

/// A world of one subject. Copies share nothing but what the functions capture.
struct SubjectRun {
  std::string name = "subject";  ///< in reports
  MeshShape mesh;
  /// Makes the subject of one rank, in that rank's process. Rank and sink outlive it.
  std::function<std::unique_ptr<Subject>(Rank& rank, Sink& sink)> make;
  /// The micro-batches of one rank in one step; called on the rank.
  std::function<std::vector<Batch>(int rank, int step)> batches;
  int steps = 1;
  /// The coarsest dtype on any tensor's path; give JudgePolicy::coarsest the same
  Dtype coarsest = Dtype::kFloat32;
  /// For optimizers whose step is a sign where the gradient is noise (Adam): parameters after a
  /// step are compared where the gradient is above its response. The same in reference, responses
  /// and run.
  bool mask_small_gradients = false;
  /// Of shared memory for what one rank keeps; pages not used cost nothing
  std::size_t trace_bytes = std::size_t{64} << 20;
  std::chrono::milliseconds deadline{60'000};
};

/// The trusted run: every record is kept.
///
/// Ranks    called by the controller.
/// Errors   MeshError unless the mesh is a world of one; InfrastructureError that says how the run
///          failed.
///
///     const Reference reference = record_reference({.mesh = MeshShape({{Axis::kTp, 1}}), .make =
///       make, .batches = batches});
[[nodiscard]] Reference record_reference(const SubjectRun& plain);

/// Runs `perturbed` (the plain run with weights moved by one ulp, say) and widens the reference's
/// responses by it. Without any response a run must equal the reference bit by bit, or
/// JudgePolicy::rtol must be given.
void add_response(Reference& reference, const SubjectRun& perturbed);

/// The run to be judged: each rank compares what it records with the reference on the spot.
/// Ranks    called by the controller.   Errors   InfrastructureError that says how a rank failed.
[[nodiscard]] Trace run_subject(const SubjectRun& run, const Reference& reference);

}  // namespace isoshard
