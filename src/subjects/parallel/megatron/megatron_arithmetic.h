// SPDX-License-Identifier: Apache-2.0
/// The arithmetic of the subject megatron, as a record.
#pragma once
#include "subjects/model/model.h"
#include "subjects/parallel/arithmetic.h"

namespace isoshard {

/// Cuts and regions as autotp has them with a split vocabulary; the sequence cut over tp where it
/// is asked for; main gradients in the buckets of the gradient buffer; runs of the distributed
/// optimizer.   Errors   as megatron_plan.
[[nodiscard]] Arithmetic megatron_arithmetic(const Model& model, const ArithmeticInputs& inputs);

}  // namespace isoshard
