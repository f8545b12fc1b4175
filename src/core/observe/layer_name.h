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

/// "model.layers.12" of "model.layers.12.mlp": up to the number; empty outside of layers.
[[nodiscard]] std::string_view layer_of(std::string_view name);

/// "mlp" of "model.layers.12.mlp": what follows the number; empty outside of layers.
[[nodiscard]] std::string_view within_layer(std::string_view name);

}  // namespace isoshard
