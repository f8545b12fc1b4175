// SPDX-License-Identifier: Apache-2.0
/// The reference of a curve with its perturbed runs, and whether a run agrees with it.
#pragma once
#include "conformance/training/train_case.h"
#include "harness/curve/curve_judge.h"
#include "harness/golden/golden.h"

namespace isoshard {

/// The unsharded run that a case is judged against.
[[nodiscard]] Case golden_reference_case(Case item);

/// Trains it and, beside it, 5 runs whose weights are one ulp away; the largest differences are the curve's spreads.
/// Ranks    called by the controller.
/// Errors   as train_case; InfrastructureError if a perturbed run ends early.
[[nodiscard]] TrainedCase train_golden_reference(const Case& item, const TrainOptions& options = {});

/// Of a subject's curve: the loss is never off by more than 1e-4 in fp32, 0.02 for fsdp_tp, 0.05 for all.
[[nodiscard]] CurveBounds golden_bounds(const Case& item);

/// Whether the run conforms to the reference, ended as it should and has equal copies; and in words why not.
[[nodiscard]] GoldenParity curve_parity(const TrainedCase& reference, const TrainedCase& trained, const CurveBounds& bounds);

}  // namespace isoshard
