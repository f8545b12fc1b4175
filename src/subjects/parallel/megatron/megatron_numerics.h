// SPDX-License-Identifier: Apache-2.0
/// What megatron says about its own arithmetic.
#pragma once
#include "subjects/model/model.h"
#include "subjects/parallel/numerics_spec.h"
#include "subjects/parallel/subject_traits.h"

namespace isoshard {

inline constexpr SubjectTraits kMegatronTraits{.splits_vocabulary = true,
                                               .fuses_layers = true,
                                               .buffers_gradients = true,
                                               .needs_fp32_masters = true};

/// Cuts and regions as autotp has them with a split vocabulary; the sequence cut over tp where it
/// is asked for; main gradients in the buckets of the gradient buffer; runs of the distributed
/// optimizer.   Errors   as megatron_plan.
[[nodiscard]] NumericsSpec megatron_numerics(const Model& model, const NumericsInputs& inputs);

}  // namespace isoshard
