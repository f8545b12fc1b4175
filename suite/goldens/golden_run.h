// SPDX-License-Identifier: Apache-2.0
/// Runs what a golden is of: to compare it, or to record a new one with its bounds and its parity
/// check.
#pragma once
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "harness/golden/compare_golden.h"
#include "harness/golden/golden_mode.h"
#include "harness/golden/golden_store.h"
#include "suite/goldens/golden_specs.h"
#include "suite/train/train_case.h"

namespace isoshard {

/// A golden without numbers: settings, SHA-256 of weights and inputs, fingerprint. Nothing is run.
///
/// Its config holds what differs from a usual run of the small model, so that a setting that is
/// added later, and is off, makes no golden stale.
[[nodiscard]] Golden golden_identity(const GoldenSpec& spec);

/// The identity and the numbers of a run on this machine; nothing may drift. `run` may bring a
/// fault.
/// Ranks    called by the controller.
/// Errors   InfrastructureError if a rank fails.
[[nodiscard]] Golden run_golden(const GoldenSpec& spec, const RunOptions& run = {});

/// What verifying one golden said.
struct GoldenCheck {
  GoldenComparison comparison;
  std::string text;  ///< render() of it
};
/// Steps of a curve that are run and compared, if it has as many.
inline constexpr int kAllSteps = std::numeric_limits<int>::max();

/// Runs a golden, of a curve the first `steps` steps, and compares it with the accepted one.
/// Errors   GoldenError if that is missing, damaged or stale, before anything runs; as run_golden.
[[nodiscard]] GoldenCheck check_golden(const GoldenStore& store, const GoldenSpec& spec,
                                       const RunOptions& run = {}, int steps = kAllSteps);

/// Records goldens: runs them, judges each against its reference, and derives what its numbers may
/// drift.
///
/// A curve may drift by 3 x the envelope of 5 perturbed runs of its reference (as in
/// docs/internals/curves.md, with its floor and ceilings); the norm of a step's tensor by what the
/// tensor itself may be off. References are kept for goldens that share one. Parity: a subject
/// conforms to its reference; the reference of a curve to ddp, run beside it without the fault.
class GoldenRecorder {
 public:
  GoldenRecorder() = default;
  /// With a fault: of subjects, and of the reference where that is what is recorded.
  explicit GoldenRecorder(RunOptions faulty) : run_(std::move(faulty)), changes_references_(true) {}
  /// Ranks    called by the controller.
  /// Errors   InfrastructureError if a rank fails.
  [[nodiscard]] Golden record(const GoldenSpec& spec);

 private:
  void record_curve(const GoldenSpec& spec, Golden& golden);
  [[nodiscard]] const TrainedCase& reference_of_curve(const Case& item);

  RunOptions run_;
  bool changes_references_ = false;
  std::map<std::string, TrainedCase> references_;  ///< by reference_slug, with their spreads
};

/// For tests: checks the golden of this name, of a curve the first `steps` steps, and says what is
/// wrong; empty for a match and for an explained drift. With --golden=record a new one, with all
/// steps, is written to `pending` instead. Nothing is ever
/// written to `accepted`.
/// Ranks    called by the controller.
/// Errors   UsageError for an unknown name; InfrastructureError if a rank fails.
[[nodiscard]] std::string golden_failure(
    const std::string& name, int steps = kAllSteps,
    const std::filesystem::path& accepted = default_golden_folder(),
    const std::filesystem::path& pending = default_pending_folder());

}  // namespace isoshard
