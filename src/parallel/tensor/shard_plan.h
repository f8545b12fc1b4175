// SPDX-License-Identifier: Apache-2.0
/// Which parameters are split over tp, and how: plain data that strategies, trainer and faults read or edit.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "mesh/layout.h"
#include "model/model.h"

namespace isoshard {

/// kColumn: dim 0 of weight and bias (the layer's output features). kRow: dim 1 of the weight (its input features); the bias is
/// whole on every rank.
enum class ShardKind : std::uint8_t { kReplicated, kColumn, kRow };
/// replicated, column, row.
[[nodiscard]] std::string_view name_of(ShardKind kind) noexcept;

/// By parameter name; a parameter that is not listed is replicated.
struct ShardPlan {
  std::map<std::string, ShardKind, std::less<>> kinds;

  [[nodiscard]] ShardKind kind_of(std::string_view parameter) const;
  /// The kind of a linear layer: that of "<module>.weight".
  [[nodiscard]] ShardKind kind_of_module(std::string_view module) const;
  /// The dimension of `spec` that is split over tp, -1 if none.
  [[nodiscard]] int sharded_dim(const ParameterSpec& spec) const;
  /// Where this plan's shard lies in the whole parameter.
  [[nodiscard]] Layout layout_of(const ParameterSpec& spec) const;
};

}  // namespace isoshard
