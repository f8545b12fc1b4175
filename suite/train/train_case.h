// SPDX-License-Identifier: Apache-2.0
/// Trains a case for many steps in a forked world and brings back its curve.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fixtures/cases/case.h"
#include "harness/curve/curve.h"
#include "harness/verdict/equal_runs.h"
#include "harness/world/forked/forked_world.h"
#include "suite/record/run_case.h"
#include "suite/train/curve_sink.h"

namespace isoshard {

/// A loss or a norm that is NaN or infinite: the run ended there.
struct NonFiniteStep {
  int step = 0;
  std::string number;  ///< "loss" or "grad_norm"
  double value = 0;
  /// The first one of that step or of the step before, found by a second run
  std::optional<NonFiniteTensor> tensor;
  int rank = -1;  ///< that had it first; the lowest of several
};

struct TrainedCase {
  Curve curve;                                  ///< up to and with the last step that ran
  std::optional<NonFiniteStep> non_finite;      ///< ran to the end if empty
  std::optional<UnequalCopies> unequal_copies;  ///< of parameters and optimizer states after a step
  /// Two ranks that report different losses or norms, in words; empty if none do.
  std::string unequal_numbers;

  [[nodiscard]] bool is_sound() const noexcept {
    return !non_finite.has_value() && !unequal_copies.has_value() && unequal_numbers.empty();
  }
};

struct TrainOptions {
  RunOptions run;  ///< faults; what it keeps and compares is not looked at
  /// Steps between two comparisons of copies; the last step always has one
  int check_interval = 10;
  /// Above 0: of the weights moved by one ulp, with this seed
  /// (suite/reference/perturbed_weights.h).
  std::uint64_t perturbed_by = 0;
  /// Called on rank 0, in its own process, after each step: for a progress line
  std::function<void(int step)> on_step = {};
};

/// Of a run that has not begun: its subject and settings, and no step.
[[nodiscard]] Curve untrained_curve(const Case& item);

/// "DDP" for ddp, "DeepSpeed AutoTP" for autotp, ...; a subject's own name if it copies nothing.
[[nodiscard]] std::string title_of_subject(const std::string& subject);

/// Trains item.steps steps of item.subject: a world of item.world_size() ranks, of one for the
/// subject "reference".
///
/// Only numbers are recorded. The run of a subject that computes right but loses a step's numbers
/// is not possible: each step has a loss.
/// Ranks    called by the controller.
/// Errors   InfrastructureError if a rank fails (WorldReport::describe()) or records no loss;
///          UsageError for an unknown subject.
/// Determinism   bit-equal between calls on one machine.
[[nodiscard]] TrainedCase train_case(const Case& item, const TrainOptions& options = {});

/// A training run under way, for several at once.
class TrainingRun {
 public:
  TrainingRun(const Case& item, TrainOptions options);
  TrainingRun(TrainingRun&&) noexcept;
  ~TrainingRun();
  /// Waits for its end. Called once.
  [[nodiscard]] TrainedCase wait();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isoshard
