// SPDX-License-Identifier: Apache-2.0
/// Names of levels, and when small gradients are masked.
#include "harness/trace/judge_policy.h"

#include <fmt/format.h>

#include <algorithm>

namespace isoshard {
namespace {

/// Goes back to the last * when the rest does not fit: linear in both texts for each *.
bool matches(std::string_view pattern, std::string_view text) {
  std::size_t p = 0, t = 0;
  std::size_t star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t]) && pattern[p] != '*') {
      ++p;
      ++t;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

}  // namespace

std::string_view name_of(Level level) noexcept {
  switch (level) {
    case Level::kExact:
      return "exact";
    case Level::kBounded:
      return "bounded";
    case Level::kPerturbed:
      return "perturbed";
    case Level::kReported:
      return "reported";
  }
  return "unknown";
}

bool matches_any(const std::vector<std::string>& patterns, const RecordKey& key) {
  const std::string text = fmt::format("{}/{}", name_of(key.kind), key.name);
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return matches(pattern, text); });
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

bool masks_small_gradients(const JudgePolicy& policy, int response_runs,
                           RunPurpose purpose) noexcept {
  return policy.mask && (purpose == RunPurpose::kResponse || response_runs > 0);
}

}  // namespace isoshard
