// SPDX-License-Identifier: Apache-2.0
/// Megatron-Core's fused layers: which Hugging Face layers are rows of one weight, in which order,
/// and under which name.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/mesh/layout.h"
#include "subjects/model/model.h"
#include "subjects/parallel/tensor/shard_plan.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"

namespace isoshard {

/// The groups of a tp rank's part, equal on all of them: q, k and v by kv group (query heads, key
/// head, value head, then those of the next group), gate and up one after the other. Empty for
/// models whose weights are fused already, and for the lattice model, whose values read another
/// tensor than its queries.
/// Source   Megatron-Core 0.19, transformer/attention.py (linear_qkv), transformer/mlp.py
///          (linear_fc1).
[[nodiscard]] std::vector<FusedLayers> fused_layers(const Model& model, const ShardPlan& plan);

/// A run of a flattened parameter, and where it begins in the flattened fused one.
struct StoredRun {
  std::int64_t begin = 0, stored = 0, count = 0;
  friend bool operator==(const StoredRun&, const StoredRun&) = default;
};

/// What is stored as one tensor: a parameter, or those of fused layers.
struct StoredParameter {
  std::string name;  ///< in Megatron's words
  Shape shape;
  std::vector<std::size_t> parameters;  ///< indices into the list that it was made from
  /// By parameter; together they cover it and the stored tensor once.
  std::vector<std::vector<StoredRun>> runs;
};

/// `shapes` are this rank's. A fused parameter takes the place of the first one that it is made of.
/// Errors ShapeError if rows and shapes do not fit.
[[nodiscard]] std::vector<StoredParameter> stored_parameters(std::span<const std::string> names,
                                                             std::span<const Shape> shapes,
                                                             std::span<const FusedLayers> groups);

/// Whether what is stored as one tensor is frozen; `is_frozen` is asked by index.
/// Errors   UsageError if only some of it is.
[[nodiscard]] bool is_frozen_unit(const StoredParameter& unit,
                                  const std::function<bool(std::size_t parameter)>& is_frozen);

/// Megatron-Core's name of a parameter of a rotary decoder (that of the fused one for q, k, v, gate
/// and up); of others the name itself.
[[nodiscard]] std::string megatron_name(std::string_view parameter);

}  // namespace isoshard
