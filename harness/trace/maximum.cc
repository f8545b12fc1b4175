// SPDX-License-Identifier: Apache-2.0
#include "harness/trace/maximum.h"

#include <algorithm>
#include <string_view>

#include "harness/trace/judge_policy.h"

namespace isoshard {

bool is_maximum(const Layout& layout) noexcept {
  return std::ranges::any_of(layout.placements, [](const Placement& placement) {
    return placement.kind == Placement::Kind::kPartial && placement.reduction == Reduction::kMax;
  });
}

bool may_be_maximum(const std::vector<std::string>& patterns, const RecordKey& key) {
  constexpr std::string_view kSuffix = "=max";
  std::vector<std::string> names;
  for (const std::string& pattern : patterns) {
    if (pattern.ends_with(kSuffix))
      names.push_back(pattern.substr(0, pattern.size() - kSuffix.size()));
  }
  return matches_any(names, key);
}

}  // namespace isoshard
