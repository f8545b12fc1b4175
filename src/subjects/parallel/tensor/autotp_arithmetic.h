// SPDX-License-Identifier: Apache-2.0
/// What autotp says about its own arithmetic.
#pragma once
#include "subjects/model/model.h"
#include "subjects/parallel/arithmetic.h"
#include "subjects/parallel/tensor/shard_plan.h"

namespace isoshard {

/// Column and row layers as autotp_plan cuts them, one sum over tp per layer and direction; ddp's
/// reductions over dp; gradients of kv heads that several ranks hold summed over those, of norms of
/// heads over all of tp. A split vocabulary as autotp_plan pads and cuts it.
/// Errors   as autotp_plan.
[[nodiscard]] Arithmetic autotp_arithmetic(const Model& model, const ArithmeticInputs& inputs);
/// The same with another plan of column and row layers, for inputs.tp ranks.
[[nodiscard]] Arithmetic autotp_arithmetic(const Model& model, const ArithmeticInputs& inputs,
                                           const ShardPlan& plan);

}  // namespace isoshard
