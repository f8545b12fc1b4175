// SPDX-License-Identifier: Apache-2.0
/// Layers as names tell them.
#pragma once
#include <cstddef>
#include <optional>
#include <string_view>

namespace isoshard {

/// The first number between dots of a name: "model.layers.12.mlp" is of layer 12.
struct LayerInName {
  std::size_t begin = 0, end = 0;  ///< where the number stands
  long number = 0;
};

/// Nothing outside of layers, and of numbers with more than 8 digits.
[[nodiscard]] std::optional<LayerInName> layer_in(std::string_view name);

}  // namespace isoshard
