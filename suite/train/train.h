// SPDX-License-Identifier: Apache-2.0
/// Trains a reference and subjects from the same weights and judges their curves: what `isoshard
/// train` does, as a function.
#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/report/report.h"
#include "suite/train/judge_training.h"

namespace isoshard {

/// What to train, as data.
struct TrainPlan {
  /// One for each subject, validated, all of one reference; without the reference itself.
  std::vector<Case> cases;
  Case reference;              ///< the run that all of them are judged against
  bool runs_reference = true;  ///< train the reference; else see reference_curve
  /// The curve of an earlier reference. Empty: the reference is trained, or nothing is judged.
  std::filesystem::path reference_curve;
  std::string fault;  ///< the id of a fault to inject into the runs of subjects; empty: none
  int perturbed_runs = kPerturbedRuns;
  int check_interval = 10;         ///< steps between two comparisons of copies
  std::filesystem::path curves;    ///< write loss_SUBJECT.json to this folder; empty: none
  std::vector<std::string> notes;  ///< lines for the head of the report
  /// Files to save the initial weights and the batches to; empty: not saved.
  std::filesystem::path save_weights, save_batch;
  /// The command that compares the first steps of a case tensor by tensor; may be empty.
  std::function<std::string(const Case&, int steps)> look_further = {};
};

/// Listens while runs train. Every function may be left as it is; none changes what is run or
/// judged.
class TrainObserver {
 public:
  TrainObserver() = default;
  TrainObserver(const TrainObserver&) = delete;
  TrainObserver& operator=(const TrainObserver&) = delete;
  virtual ~TrainObserver() = default;

  /// A run begins: "autotp", "reference and perturbed runs".
  virtual void on_start(const std::string& /*run*/) {}
  /// Whether on_step is to be called at all: it costs every step a call.
  [[nodiscard]] virtual bool watches_steps() const { return false; }
  /// A step ended. Called in the process of rank 0, not in that of the controller.
  virtual void on_step(const std::string& /*run*/, int /*step*/) {}
  /// Something to tell beside the verdicts.
  virtual void on_note(const std::string& /*line*/) {}
  /// A run ended and was judged, or failed.
  virtual void on_curve(const ReportCurve& /*item*/) {}
};

/// Trains the reference with its perturbed runs, unless the plan brings a curve of it, then every
/// case, and judges each curve.
///
/// A run that throws, whatever it throws, is reported as incomplete, and the others still train.
/// After an interrupt the report has what ended until then, and exit code 130 or 143.
///
/// Ranks    called by the controller.
/// Errors   as train_reference, and of a plan with one case the UsageError and FileError of
///          train_case: of several cases they are the failure of their run; FileError if
///          reference_curve is not the curve of a reference; UsageError if it is one of other
///          settings.
[[nodiscard]] Report train(const TrainPlan& plan, TrainObserver& observer);

}  // namespace isoshard
