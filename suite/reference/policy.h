// SPDX-License-Identifier: Apache-2.0
/// How the runs of a case are judged.
#pragma once
#include "fixtures/cases/case.h"
#include "harness/trace/judge_policy.h"

namespace isoshard {

/// What follows from the case: dtype, masks of small gradients, declared gradient scale, level
/// exact for a lattice model, and what a diagnosis should know.
[[nodiscard]] JudgePolicy policy_of(const Case& c);
/// The same with no tolerance for anything: against an emulated reference.
[[nodiscard]] JudgePolicy exact_policy_of(const Case& c);

}  // namespace isoshard
