// SPDX-License-Identifier: Apache-2.0
/// What data parallelism says about its own arithmetic.
#pragma once
#include <span>

#include "subjects/model/model.h"
#include "subjects/parallel/numerics_spec.h"

namespace isoshard {

/// Replicas; gradients averaged over dp in GradientReducer's buckets; loss averaged and tokens
/// counted over dp.
/// Errors   UsageError for a tp degree above 1 or a split vocabulary.
[[nodiscard]] NumericsSpec ddp_numerics(const Model& model, const NumericsInputs& inputs);

/// The shape of a parameter as a rank holds it, which is the same on all ranks.
[[nodiscard]] Shape held_shape(const TensorNumerics& tensor, const ParameterSpec& spec);

/// What holds for any model whose parameters lie as `numerics.tensor.cuts` say: mesh, dtypes,
/// points, buckets.
void add_data_parallelism(NumericsSpec& numerics, std::span<const ParameterSpec> specs,
                          const NumericsInputs& inputs);

}  // namespace isoshard
