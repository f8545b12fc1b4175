// SPDX-License-Identifier: Apache-2.0
/// Convergence tests by the guideline of torchtitan: what `isoshard converge` does, as a function.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "harness/report/report.h"
#include "suite/converge/converge_rules.h"
#include "suite/converge/judge_convergence.h"
#include "suite/converge/test_set.h"
#include "suite/train/train.h"

namespace isoshard {

/// What to train, as data. All cases are validated, and the rules hold (require_rules).
struct ConvergePlan {
  Case control;                      ///< 1D FSDP
  Case check;                        ///< small_check: judged against ddp first
  std::vector<TestSet> sets;         ///< none: the control is trained alone
  std::vector<std::uint64_t> seeds;  ///< a control for each
  /// Empty: every set is trained for each of `seeds`, beside the control of the same seed. Else
  /// every set is trained with these weights instead, on the same samples as all controls, which
  /// are those of the control's own seed; runs are compared over seeds.
  std::vector<std::uint64_t> test_seeds = {};
  std::vector<ConvergeRule> rules;
  std::string fault;  ///< the id of a fault to inject into the test sets; empty: none
  int perturbed_runs = kPerturbedRuns;
  int check_interval = 10;
  std::filesystem::path folder;  ///< for curves, converge.json and figures; empty: none
  std::vector<std::string> notes;

  /// One seed for all runs: names and titles need none.
  [[nodiscard]] bool has_one_seed() const { return seeds.size() == 1 && test_seeds.empty(); }
};

/// One run of a test set.
struct ConvergeRun {
  std::size_t set = 0;  ///< its place in the plan
  std::uint64_t seed = 0;
  Curve curve = {};  ///< without steps if the run failed
  std::optional<ConvergenceVerdict> judged = {};
  std::string failure = {};  ///< why the run did not end; empty if it did
};

/// One control run.
struct ConvergeControl {
  std::uint64_t seed = 0;
  PerturbedCase runs = {};
  std::string problem = {};  ///< why nothing can be judged against it; empty if it can
};

struct ConvergeResult {
  CurveVerdict check;  ///< of the control set against ddp
  std::vector<ConvergeControl> controls;
  std::vector<ConvergeRun> runs;
  Report report;  ///< the curves with their verdicts, and the exit code
};

/// Judges 1D FSDP against ddp on the small model, then trains for every seed the control with its
/// perturbed runs and every test set, and judges each. With test_seeds, controls have no perturbed
/// runs: their spread over seeds is what counts. A run that throws is reported as incomplete,
/// and the others still train. After an interrupt the result has what ended until then.
///
/// Ranks    called by the controller.
/// Errors   as train.
[[nodiscard]] ConvergeResult converge(const ConvergePlan& plan, TrainObserver& observer);

}  // namespace isoshard
