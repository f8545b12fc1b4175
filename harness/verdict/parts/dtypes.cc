// SPDX-License-Identifier: Apache-2.0
// Ranks by dtype, and the dtype that most of them should have.
#include "harness/verdict/parts/dtypes.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/mesh/mesh_words.h"
#include "harness/trace/parts.h"

namespace isoshard::detail {

std::vector<int> MixedDtypes::odd_ranks() const {
  std::vector<int> odd;
  for (const auto& [dtype, ranks] : others) odd.insert(odd.end(), ranks.begin(), ranks.end());
  std::ranges::sort(odd);
  return odd;
}

std::string MixedDtypes::words() const {
  std::string text;
  for (const auto& [dtype, ranks] : others)
    text += fmt::format("{} on {}, ", name_of(dtype), words_of_ranks(ranks));
  return text + fmt::format("{} on {}", name_of(usual), words_of_ranks(usual_ranks));
}

std::optional<MixedDtypes> mixed_dtypes(const std::vector<Held>& held, Dtype reference) {
  std::map<Dtype, std::vector<int>> by_dtype;
  for (const Held& h : held) {
    if (has_elements(*h.record)) by_dtype[h.record->dtype].push_back(h.rank->rank);
  }
  if (by_dtype.size() < 2) return std::nullopt;
  auto usual = by_dtype.find(reference);
  if (usual == by_dtype.end()) {
    usual = std::ranges::max_element(by_dtype, {},
                                     [](const auto& entry) { return entry.second.size(); });
  }
  MixedDtypes mixed{.usual = usual->first, .usual_ranks = usual->second, .others = {}};
  by_dtype.erase(usual);
  mixed.others = std::move(by_dtype);
  return mixed;
}

const Held* with_other_dtype(const std::vector<Held>& held, Dtype reference) {
  const auto found = std::ranges::find_if(
      held, [&](const Held& h) { return h.record->dtype != reference && has_elements(*h.record); });
  return found == held.end() ? nullptr : &*found;
}

}  // namespace isoshard::detail
