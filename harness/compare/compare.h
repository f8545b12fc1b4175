// SPDX-License-Identifier: Apache-2.0
/// Compares runs on disk: bundles tensor by tensor, or two loss curves. What `isoshard compare`
/// does, as a function.
#pragma once
#include <filesystem>
#include <functional>
#include <optional>

#include "harness/checkpoints/compare_checkpoints.h"
#include "harness/compare/given_findings.h"
#include "harness/curve/curve_judge.h"
#include "harness/judge/compare_bundles.h"
#include "harness/report/report.h"

namespace isoshard {

class Comparer;

/// What to compare, as data: a reference and an actual run, or every pair of a folder.
struct ComparePlan {
  std::filesystem::path reference, actual;  ///< two bundles, loss curves or checkpoints
  std::filesystem::path input_dir;          ///< of dumped runs; empty: the two above
  /// Allowed relative Frobenius error. None: the responses of the reference decide, and without
  /// responses every bit must be equal.
  std::optional<double> rtol;
  bool allows_different_settings = false;
  /// Of two bundles: what else whoever compares says of the judged run; `different` is not read.
  BundleRules rules = {};
  /// Of two bundles: what another program found out about the judged run (--findings).
  GivenFindings given = {};
  /// What each verdict on a bundle must be; kNone: any (require_strength).
  Strength require = Strength::kNone;
  /// Whether `reference` and `actual` are checkpoints. Of `checkpoint` what has the same name here
  /// is not read.
  bool are_checkpoints = false;
  CheckpointRules checkpoint = {};
  /// What compares tensors; nullptr: accumulate(), on this CPU. It must outlive the comparison.
  Comparer* comparer = nullptr;
  /// The bounds of a curve, which may depend on its subject; empty: the usual ones.
  std::function<CurveBounds(const Curve& actual)> bounds_of = {};
};

/// Called with each part of the report as soon as it is there. Each may be empty.
struct CompareObserver {
  std::function<void(const ReportCase&)> on_case = {};
  std::function<void(const ReportCurve&)> on_curve = {};
};

/// Checks what can be checked before anything is compared or written.
/// Errors   UsageError if the plan names a bundle and a curve, or less than two runs, or a comparer
///          for two curves, or if rtol is not in [0, 1).
void require_comparable(const ComparePlan& plan);

/// Errors   as require_comparable; UsageError if settings differ and may not; FileError for a
///          malformed file.
/// Determinism   a function of its plan and the files. A comparer moves sums by 1e-12 at most.
[[nodiscard]] Report compare(const ComparePlan& plan, const CompareObserver& observer = {});

}  // namespace isoshard
