// SPDX-License-Identifier: Apache-2.0
/// Activation gradients that differ while every parameter's gradient is right: where they were
/// recorded, and not what was computed.
#pragma once
#include <string>
#include <vector>

#include "harness/trace/reference.h"
#include "harness/verdict/verdict.h"

namespace isoshard::detail {

/// A sentence for the verdict's notes if `findings` are nothing but values of activation gradients,
/// and parameters' gradients show that these values were not used; empty if they must stay
/// findings.
///
/// A hook of a framework may run behind the recorder's, such as the one that adds up a gradient
/// over ranks. Then the tap is in front of it. A weight's gradient is made of what came after all
/// hooks, so it tells both cases apart where all of these hold:
///
/// - every record of the reference but numbers of a step (scalars) was compared;
/// - each parameter that is read has a gradient in each step, and it is within its tolerance, which
///   shows something (TensorComparison::weakness) and follows from responses;
/// - each differing activation gradient is finite, whole, and off by at least ten times the largest
///   relative error that any gradient of a parameter is allowed in its step: if it had been used,
///   they would show it.
///
/// What it misses: a wrong gradient that reaches no parameter, such as one of the model's inputs.
[[nodiscard]] std::string note_on_taps(const Reference& reference, const MeshShape& mesh,
                                       const std::vector<TensorComparison>& tensors,
                                       const std::vector<const Finding*>& findings);

}  // namespace isoshard::detail
