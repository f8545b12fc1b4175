// SPDX-License-Identifier: Apache-2.0
// Nearest-name search by edit distance.
#include "core/base/suggest.h"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <vector>

namespace isoshard {
namespace {

std::string folded(std::string_view name) {
  std::string out(name);
  for (char& c : out)
    c = c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

/// "Qwen2.5-0.5B" of "Qwen/Qwen2.5-0.5B".
std::string_view last_part(std::string_view name) {
  return name.substr(name.find_last_of('/') + 1);
}

// a mistyped name, not a file: keeps the quadratic search small
constexpr std::size_t kLongestCompared = 256;

}  // namespace

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

std::string did_you_mean(std::string_view wrong, std::span<const std::string> known) {
  if (wrong.empty() || wrong.size() > kLongestCompared) return "";
  const std::string wanted = folded(wrong);
  const std::string* best = nullptr;
  std::size_t best_distance = 0;
  for (const std::string& name : known) {
    const std::string candidate = folded(
        wrong.find('/') == std::string_view::npos ? last_part(name) : std::string_view(name));
    std::size_t distance = edit_distance(wanted, candidate);
    const bool begins =
        wanted.size() >= 2 &&
        (candidate.starts_with(wanted) || (candidate.size() >= 2 && wanted.starts_with(candidate)));
    if (begins) distance = std::min<std::size_t>(distance, 2);
    const std::size_t longer = std::max(wanted.size(), candidate.size());
    // A name of which nothing would stay is not near, however short it is.
    const std::size_t limit = std::min(std::max<std::size_t>(2, longer / 3), longer - 1);
    if (distance > limit) continue;
    if (best == nullptr || distance < best_distance) {
      best = &name;
      best_distance = distance;
    }
  }
  return best == nullptr ? "" : " (did you mean '" + *best + "'?)";
}

std::string join_names(std::span<const std::string> names) {
  std::string out;
  for (const std::string& name : names) {
    if (!out.empty()) out += ", ";
    out += name;
  }
  return out;
}

}  // namespace isoshard
