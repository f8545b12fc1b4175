// SPDX-License-Identifier: Apache-2.0
/// Verifies a list of cases: what `isoshard verify` does, as a function.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/report/report.h"
#include "suite/verify/case_judgement.h"
#include "suite/verify/verify_observer.h"

namespace isoshard {

/// What to verify, as data.
struct VerifyPlan {
  /// Validated; with tables in the order of order_for_tables (suite/verify/side_by_side.h).
  std::vector<Case> cases;
  ReferenceKind reference = ReferenceKind::kAuto;
  std::string fault = {};  ///< the id of a fault to inject into every run; empty: none
  bool tables = false;     ///< put the runs side by side
  bool fail_fast = false;  ///< no case runs after one that is not as it should be
  int repeat = 1;          ///< runs of each subject (JudgePlan::repeat)
  /// What each case must be; one that conforms more weakly is named, and exit code 1. kNone: any.
  Strength require = Strength::kNone;
  std::vector<std::string> notes = {};  ///< lines for the head of the report
  /// Of several processes that verify together (Launcher::peers), one writes files.
  bool writes = true;
  std::filesystem::path dump = {};  ///< write every run as a bundle below this folder; empty: none
  /// Files to save the initial weights and the batches to; empty: not saved.
  std::filesystem::path save_weights = {}, save_batch = {};
};

/// What the cases exercise, of all that is known.
[[nodiscard]] std::vector<ReportFeature> features_of(const std::vector<Case>& cases);

/// Runs every case against its reference and judges it.
///
/// A case that throws, whatever it throws, is reported as incomplete with the exit code of what it
/// threw, and the other cases still run. After an interrupt the report has what was judged until
/// then, and exit code 130 or 143. With fail_fast it ends with the first case
/// whose exit code is not 0, and its summary says how many did not run.
///
/// Ranks    called by the controller.
/// Errors   UsageError for no case; the UsageError and FileError of CaseJudge::judge_case if there
///          is one case only.
/// Determinism   a function of its plan, apart from the failures of worlds.
///
/// Example
///     VerifyObserver quiet;
///     const Report report = verify({.cases = preset_cases("small")}, quiet);
[[nodiscard]] Report verify(const VerifyPlan& plan, VerifyObserver& observer);

}  // namespace isoshard
