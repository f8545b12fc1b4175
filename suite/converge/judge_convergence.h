// SPDX-License-Identifier: Apache-2.0
/// The verdict on one run of a test set beside its control.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "suite/converge/curve_distance.h"
#include "suite/converge/seed_distance.h"
#include "suite/train/judge_training.h"

namespace isoshard {

struct ConvergenceVerdict {
  /// Of the whole: what the run found by itself, the bounds of every step, and the distances. Its
  /// `first` is a number of a step.
  CurveVerdict verdict;
  std::vector<CurveDistance> distances;  ///< empty if the run did not end, or nothing can be judged
  double least_shift = 0;                ///< least_shift_seen; 0 if nothing can be judged
  int seen_from = -1;  ///< the first step in which a run that diverges is seen to; -1: none is told
  std::vector<SeedDistance> over_seeds;  ///< of runs with other seeds than their controls
};

/// Why nothing can be judged against this control; empty if it can: it is not sound, its perturbed
/// runs are too far from it in the first step, or as whole curves further than is ever allowed.
[[nodiscard]] std::string problem_of_control(const PerturbedCase& control);

/// Judges a run of a test set: its steps as long as they can be judged one by one
/// (num_judged_steps), and the whole curve. Bounds follow from the control's settings and perturbed
/// runs, never from what the run says of itself.
///
/// `shares_batches`: the micro-batches of both are the same, so that a dp rank has the same samples
/// in both. Else only numbers of the global batch are compared.
/// Requires   the control was trained with perturbed runs.
[[nodiscard]] ConvergenceVerdict judge_convergence(const PerturbedCase& control,
                                                   const TrainedCase& run, bool shares_batches);

/// Judges the runs of one test set whose seeds differ from those of their controls: by what each
/// run finds by itself, and by the spread of the controls over their seeds. Steps are not compared.
///
/// Guarantees   one verdict for each run, in their order.
/// Errors       as seed_distances, but for runs that ended early: these diverge.
[[nodiscard]] std::vector<ConvergenceVerdict> judge_over_seeds(std::span<const Curve> controls,
                                                               std::span<const TrainedCase> runs);

}  // namespace isoshard
