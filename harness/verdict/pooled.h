// SPDX-License-Identifier: Apache-2.0
/// Many tensors judged together: in 16 bits one of them hides a small factor in its roundings, and
/// all of them do not (docs/internals/tolerances.md, "Pooled statistics").
#pragma once
#include <vector>

#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"
#include "harness/trace/trace.h"
#include "harness/verdict/verdict.h"

namespace isoshard {

/// The chance that a correct run's best-fit scale, or its shift, is outside in one pool. There are
/// few pools of everything and few numbers such as the loss, and very many others.
inline constexpr double kFalseAlarmOfAll = 1e-6;
inline constexpr double kFalseAlarmOfPool = 1e-8;

/// Every pool of the run, in the order in which faults show; within one step and kind all tensors,
/// layers, classes, ranks, single tensors.
///
/// `tensors` are the comparisons of the run `actual`. Empty unless the coarsest dtype has 16 bits
/// and the reference has redrawn runs. A tensor takes part if it is judged within tolerances, is no
/// rounding noise (insensitive), is finite, is masked nowhere, and was recorded by redrawn runs.
[[nodiscard]] std::vector<PooledComparison> pooled_comparisons(
    const Reference& reference, const std::vector<TensorComparison>& tensors, const Trace& actual,
    const JudgePolicy& policy);

/// One for each step and kind of tensors with a pool outside its bounds: the broadest one that
/// is off by nearly as much as the one that is farthest outside. Sorted as `pools`. A pool of one
/// number, such as the loss, has its offset and its factor as alternatives: any error is both.
/// Other pools have no cause. What moves many tensors a little is often a bug before them.
[[nodiscard]] std::vector<Finding> pooled_findings(const std::vector<PooledComparison>& pools,
                                                   const Reference& reference);

}  // namespace isoshard
