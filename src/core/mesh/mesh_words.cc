// SPDX-License-Identifier: Apache-2.0
#include "core/mesh/mesh_words.h"

#include <fmt/format.h>

#include <cstddef>
#include <iterator>

namespace isoshard {

std::string words_of(std::span<const AxisDegree> axes, std::string_view without_axes) {
  std::string text;
  for (const AxisDegree& axis : axes)
    text += fmt::format("{}{} {}", text.empty() ? "" : " x ", name_of(axis.axis), axis.degree);
  return text.empty() ? std::string(without_axes) : text;
}

std::string ranges_in_words(const std::vector<int>& numbers) {
  std::string words;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (!words.empty()) words += ", ";
    if (end - i > 2) {
      words += fmt::format("{} to {}", numbers[i], numbers[end - 1]);
    } else {
      words += end - i == 2 ? fmt::format("{}, {}", numbers[i], numbers[i + 1])
                            : fmt::format("{}", numbers[i]);
    }
    i = end;
  }
  return words;
}

std::string words_of_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + ranges_in_words(ranks);
}

std::string on_ranks(const std::vector<int>& ranks, const MeshShape& mesh) {
  if (ranks.empty()) return "";
  const bool are_all = ranks.size() > 1 && std::ssize(ranks) == mesh.world_size();
  return are_all ? " on all ranks" : " on " + words_of_ranks(ranks);
}

}  // namespace isoshard
