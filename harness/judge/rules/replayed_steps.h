// SPDX-License-Identifier: Apache-2.0
/// Steps of Adam and AdamW, made again from what the run itself recorded.
#pragma once
#include <vector>

#include "harness/judge/rules/judged_run.h"

namespace isoshard::detail {

/// Findings of steps that are not what the optimizer's rule makes. Computes each step of a
/// parameter, or of its master, again: from the value before it, the moments after it and the
/// hyperparameters, by the rule of Adam or AdamW, in fp64. Each element must be what the rule
/// gives, to a few roundings of the dtypes of the value and of the moments. What gradients have of
/// noise is in the moments, too, so this sees an error of the rule (rate, decay, correction of the
/// bias, a step made twice) which tolerances of the tensor would hide.
///
/// Hyperparameters and counts of updates are the reference's. A tensor is replayed only if the
/// reference's own step is what the rule makes of the reference's state: other optimizers, and
/// steps that were skipped, are left out. So are ranks that hold exactly what the reference does,
/// and tensors of more than 4 million elements.
[[nodiscard]] std::vector<OrderedFinding> replay_steps(const JudgedRun& run);

}  // namespace isoshard::detail
