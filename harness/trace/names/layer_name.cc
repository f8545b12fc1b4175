// SPDX-License-Identifier: Apache-2.0
// Layers as names tell them.
#include "harness/trace/names/layer_name.h"

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

}  // namespace isoshard
