// SPDX-License-Identifier: Apache-2.0
/// What a comparison would have missed, in one line: a tolerance is worth as much as the smallest
/// error that it rejects.
#pragma once
#include <string>

#include "harness/verdict/verdict.h"

namespace isoshard {

/// "scale errors below 0.2 % in all gradients, 2.1 % in gradient of k_proj.bias": the smallest
/// common factor of all gradients that would have been rejected, and the single gradient in which
/// the largest one passes. Of a run without gradients the same of its forward pass. At level exact
/// "nothing ...". Empty if nothing was judged.
[[nodiscard]] std::string would_miss(const Verdict& verdict, const JudgePolicy& options);

/// Of a verdict within tolerance where it shows least, in a few words: "misses scale errors below
/// 2.1 % in k_proj.bias", or how little of the parameters was judged, if that is less than half.
/// Empty for any other verdict.
[[nodiscard]] std::string weakest_point(const Verdict& verdict);

}  // namespace isoshard
