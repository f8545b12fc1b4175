// SPDX-License-Identifier: Apache-2.0
/// What data parallelism says about its own arithmetic.
#pragma once
#include <span>

#include "subjects/model/model.h"
#include "subjects/parallel/arithmetic.h"

namespace isoshard {

/// Replicas; gradients averaged over dp in GradientReducer's buckets; loss averaged and tokens
/// counted over dp.
/// Errors   UsageError for a tp degree above 1 or a split vocabulary.
[[nodiscard]] Arithmetic ddp_arithmetic(const Model& model, const ArithmeticInputs& inputs);

/// The shape of a parameter as a rank holds it, which is the same on all ranks.
[[nodiscard]] Shape held_shape(const Arithmetic& arithmetic, const ParameterSpec& spec);

/// The part of it that holds for any model whose parameters lie as `arithmetic.cuts` say: degrees,
/// dtypes, points, buckets.
void add_data_parallelism(Arithmetic& arithmetic, std::span<const ParameterSpec> specs,
                          const ArithmeticInputs& inputs);

}  // namespace isoshard
