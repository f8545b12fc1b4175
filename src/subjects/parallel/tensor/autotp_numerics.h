// SPDX-License-Identifier: Apache-2.0
/// What autotp says about its own arithmetic.
#pragma once
#include "subjects/model/model.h"
#include "subjects/parallel/numerics_spec.h"
#include "subjects/parallel/tensor/shard_plan.h"

namespace isoshard {

/// Column and row layers as autotp_plan cuts them, one sum over tp per layer and direction; ddp's
/// reductions over dp; gradients of kv heads that several ranks hold summed over those, of norms of
/// heads over all of tp. A split vocabulary as autotp_plan pads and cuts it. With a sequence that
/// is cut over tp, gradients of what each token is used with are summed over tp, too.
/// Errors   as autotp_plan.
[[nodiscard]] NumericsSpec autotp_numerics(const Model& model, const NumericsInputs& inputs);
/// The same with another plan of column and row layers, for as many tp ranks.
[[nodiscard]] NumericsSpec autotp_numerics(const Model& model, const NumericsInputs& inputs,
                                           const ShardPlan& plan);

}  // namespace isoshard
