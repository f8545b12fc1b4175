// SPDX-License-Identifier: Apache-2.0
/// Judges runs of any subject against a trusted one, the whole way: reference, responses, faults,
/// tables, bundles and a report.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "harness/fault/collective_fault.h"
#include "harness/report/report.h"
#include "harness/run/run_spec.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {

/// A bug that is put on the runs from outside, to see that it is found. One of the two is set.
struct RunFault {
  std::string name;  ///< in the report
  std::shared_ptr<const CollectiveFault> collective = nullptr;
  std::function<TapMutation(int rank)> tap = {};
};

/// What to verify, as data. The policy of the reference counts for all runs, but for the gradient
/// scale, which is each run's own.
struct RunPlan {
  RunSpec reference;  ///< the trusted run: a world of one
  /// The reference with all weights moved by one ulp, each time elsewhere. Three are usual, and
  /// none if the policy has the level exact or an rtol.
  std::vector<RunSpec> perturbed = {};
  std::vector<RunSpec> runs = {};  ///< to be judged; each has a name of its own
  std::optional<RunFault> fault = {};
  bool tables = false;  ///< put the runs side by side
  /// How often each run is made; every later one must be the first one, bit by bit. From the second
  /// on ranks are delayed at random before collectives (harness/fault/random_delays.h), so that a
  /// race comes out another way.
  int repeat = 1;
  std::uint64_t seed = 0;  ///< of the delays
  /// Every run is written below it as a bundle, for `isoshard compare`; empty: none is
  std::filesystem::path dump = {};
  /// Of the bundles: what two comparable runs must share, as a JSON object
  std::string training = "{}";
};

/// Runs the reference, its perturbed runs and the runs, and judges each of these. A run whose world
/// breaks down, or on which the fault has no effect, is reported as incomplete, and the others are
/// still judged. Runs of one spec that are not equal bit by bit diverge as not repeatable, whatever
/// the first one says. After an interrupt the report has what was judged until then, and exit code
/// 130 or 143.
///
/// Ranks    called by the controller.
/// Errors   UsageError for a plan without runs, with two of one name, or with repeat < 1; MeshError
///          unless the reference is a world of one; InfrastructureError if the reference or a
///          perturbed run fails; as write_bundle.
///
///     const Report report = verify_runs({.reference = mlp_run(1), .runs = {mlp_run(4)}});
///     write_report("out", report);  // text and JSON (harness/report/formats/report_formats.h)
///     return report.exit_code;
[[nodiscard]] Report verify_runs(const RunPlan& plan, Launcher& launcher = default_launcher());

}  // namespace isoshard
