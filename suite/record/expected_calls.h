// SPDX-License-Identifier: Apache-2.0
/// The table of collectives of a subject's training step, by what it declares about its arithmetic.
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "fixtures/cases/case.h"
#include "harness/trace/judge_policy.h"

namespace isoshard {

/// What each rank of the case must call in each step, from the start of its forward pass to the end
/// of the optimizer's step. Written from NumericsSpec and from docs/reference/subjects.md alone: it
/// shares no code with what makes the calls.
///
/// Order is that of each axis. Calls on different axes may overlap, and gradients are reduced while
/// backward still runs: their order against each other is free. The sizes of buckets that DDP makes
/// anew after its first step depend on the order in which autograd ends: their sum counts. Which
/// micro-batch a stage of a pipeline computes when is its schedule's business, so the order of
/// calls along pp, cp and tp is free there, and their number is not.
/// Guarantees   empty for a case that declares no numerics.
[[nodiscard]] CollectiveTable collective_table(const Case& item);

/// The settings of a bundle of what these cases are judged against, with what each of them must
/// call ("judging", "collectives": harness/bundle/run_calls.h). `settings` is a JSON object.
[[nodiscard]] std::string with_calls_of(std::string_view settings, std::span<const Case> cases);

/// The same policy, with the table of the case.
[[nodiscard]] JudgePolicy with_collectives(JudgePolicy policy, const Case& item);

}  // namespace isoshard
