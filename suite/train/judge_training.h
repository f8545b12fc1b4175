// SPDX-License-Identifier: Apache-2.0
/// The reference of a training run with its perturbed runs, and the verdict on a subject's run.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "harness/curve/curve_judge.h"
#include "suite/train/train_case.h"

namespace isoshard {

inline constexpr int kPerturbedRuns = 5;

/// A run and those of the same case whose initial weights are one ulp away.
struct PerturbedCase {
  TrainedCase trained;  ///< its curve has the spreads
  std::vector<Curve> perturbed;
};

/// Trains a case of any subject, and beside it, on the other cores, runs of it whose weights are
/// one ulp away; their largest differences are the curve's spreads, unbounded if one of them did
/// not end. Results do not depend on the number of cores.
/// Errors   as train_case.
[[nodiscard]] PerturbedCase train_perturbed(const Case& item, int perturbed_runs,
                                            const TrainOptions& options = {});

/// train_perturbed of the reference of a case. A lattice model has no perturbed runs: its subjects
/// must be equal to it.
///
/// Where the case goes on from a checkpoint of a run with its own settings, the reference and its
/// perturbed runs are not interrupted: they train from the first step on and load nothing, so what
/// the judged run loads must be what it would have had. The curve has the steps behind the
/// checkpoint, and spreads of all steps. Where the checkpoint says otherwise (why_not_one_run), the
/// reference goes on from it, too.
/// Errors   as train_case.
[[nodiscard]] TrainedCase train_reference(const Case& item, int perturbed_runs = kPerturbedRuns,
                                          const TrainOptions& options = {});

/// What is allowed of a subject's curve: never more than 1e-4 in fp32 and fp64, 0.02 for fsdp_tp,
/// 0.05 for all (seeds/001). Dtypes are read from the settings of the curve.
[[nodiscard]] CurveBounds curve_bounds(const Curve& actual);

/// Why the bounds are not known to hold with the case's optimizer; empty if they are: up to
/// largest_rate, SGD with clipping.
[[nodiscard]] std::string outside_range(const Case& item);

/// "the loss of step 4 is nan; the first tensor that is no number is ... on rank 2"; empty for a
/// run that ended as it should.
[[nodiscard]] std::string non_finite_in_words(const TrainedCase& trained);

/// The largest rate of the case's optimizer for which the bounds are known to hold: AdamW 1e-3, SGD
/// 0.1, in 16 bits 0.02.
[[nodiscard]] double largest_rate(const Case& item);

/// What a run finds without a reference: numbers that are none, copies and numbers that differ
/// between ranks. Empty if it is sound.
[[nodiscard]] std::string found_without_reference(const TrainedCase& trained);

/// judge_curve, and what the run itself found: numbers that are none, copies that differ.
/// Errors   UsageError for different settings.
[[nodiscard]] CurveVerdict judge_training(const Curve& reference, const TrainedCase& trained);

}  // namespace isoshard
