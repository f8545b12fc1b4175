// SPDX-License-Identifier: Apache-2.0
/// Reference, responses and run of any subject, for tests that judge by a matcher. verify_runs
/// (harness/verify/verify_runs.h) does all of it and returns a report.
#pragma once
#include "harness/run/record.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {

/// The trusted run: every record is kept. On processes of several hosts each host runs it
/// (WorldOptions::on_each_host), so it must write no file.
///
/// Ranks    called by the controller.
/// Errors   MeshError unless the mesh is a world of one; InfrastructureError that says how the run
///          failed.
///
///     const Reference reference = record_reference({.mesh = MeshShape({{Axis::kTp, 1}}), .make =
///       make, .batches = batches});
[[nodiscard]] Reference record_reference(RunSpec plain, Launcher& launcher = default_launcher());

/// Runs `perturbed` (the plain run with weights moved by one ulp, say) and widens the reference's
/// responses by it. Without any response a run must equal the reference bit by bit, or
/// JudgePolicy::rtol must be given.
void add_response(Reference& reference, RunSpec perturbed, Launcher& launcher = default_launcher());

/// The run to be judged. Each rank compares its records with the reference as it makes them.
/// Ranks    called by the controller.   Errors   InfrastructureError that says how a rank failed.
[[nodiscard]] Trace run_subject(const RunSpec& run, const Reference& reference,
                                Launcher& launcher = default_launcher());

}  // namespace isoshard
