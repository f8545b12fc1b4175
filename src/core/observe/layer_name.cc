// SPDX-License-Identifier: Apache-2.0
// Layers as names tell them.
#include "core/observe/layer_name.h"

#include <algorithm>
#include <charconv>

namespace isoshard {

std::optional<LayerInName> layer_in(std::string_view name) {
  constexpr std::size_t kMostDigits = 8;
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view word = name.substr(begin, end - begin);
    if (!word.empty() && word.size() <= kMostDigits &&
        word.find_first_not_of("0123456789") == std::string_view::npos) {
      LayerInName layer{begin, end};
      (void)std::from_chars(word.data(), word.data() + word.size(), layer.number);
      return layer;
    }
    begin = end + 1;
  }
  return std::nullopt;
}

std::string_view layer_of(std::string_view name) {
  const std::optional<LayerInName> layer = layer_in(name);
  return layer.has_value() ? name.substr(0, layer->end) : std::string_view();
}

std::string_view within_layer(std::string_view name) {
  const std::optional<LayerInName> layer = layer_in(name);
  return layer.has_value() && layer->end < name.size() ? name.substr(layer->end + 1)
                                                       : std::string_view();
}

}  // namespace isoshard
