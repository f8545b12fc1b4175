// SPDX-License-Identifier: Apache-2.0
/// Judging a whole run against its reference.
#pragma once
#include "harness/trace/reference.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// Judges a run. Pure; prints nothing. Findings are sorted by step, stage and the reference's
/// execution order.
///
/// Incomplete: a rank of the mesh is missing. Vacuous: nothing was compared, nothing finite was
/// there to compare with, or the level is perturbed and the reference has no responses, or some
/// comparison that passed would have let a wrong tensor pass (TensorComparison::weakness), or too
/// little of a tensor's elements or of the gradients was judged (harness/verdict/judged_share.h). A
/// published bound that does not hold diverges. Missing, extra and misplaced tensors diverge.
/// Signed zeros are equal. A NaN on one side is never within any tolerance. Within tolerances, what
/// is not finite of the gradients of a skipped step is not compared; its copies must be equal.
/// Errors   none for what a run may do wrong: an incomplete, vacuous or divergent run is a verdict.
[[nodiscard]] Verdict judge(const Reference& reference, const Trace& actual,
                            const JudgePolicy& options);

}  // namespace isoshard
