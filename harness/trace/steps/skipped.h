// SPDX-License-Identifier: Apache-2.0
/// Steps that a run does not take because its gradients are not finite.
#pragma once
#include "harness/trace/reference.h"
#include "harness/trace/trace.h"

namespace isoshard {

/// Whether the reference skipped the step: an element of its found_inf is not 0.
[[nodiscard]] bool is_skipped_step(const Reference& reference, int step);

/// Whether the rank says that it skipped the step. False if it kept no found_inf.
[[nodiscard]] bool is_skipped_step(const RankTrace& rank, int step);

}  // namespace isoshard
