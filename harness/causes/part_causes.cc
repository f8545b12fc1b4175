// SPDX-License-Identifier: Apache-2.0
/// A part of a tensor that did not reach a rank: copies are equal but for runs of elements, and in
/// each of them at least one rank has the right values.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"

namespace isoshard::detail {
namespace {

/// Elements that follow each other in the flattened tensor, first and last.
using ElementRun = std::pair<std::int64_t, std::int64_t>;

constexpr std::int64_t kGap = 256;       ///< right elements between two wrong ones of a run
constexpr std::int64_t kLeastRun = 32;   ///< fewer are single elements
constexpr std::size_t kMostRuns = 64;    ///< more are scattered
constexpr double kLeastShare = 0.5;      ///< of a run that is wrong
constexpr double kLeastOfTensor = 0.05;  ///< of the tensor

/// Where a copy is wrong, element by element.
std::vector<bool> wrong_elements(const View& view, double near) {
  const Values seen = view.actual.contiguous(), right = view.expected.contiguous();
  const double typical = norm_of(right) / std::sqrt(static_cast<double>(right.numel()));
  std::vector<bool> wrong(right.flat().size());
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    const double value = right.flat()[i];
    wrong[i] = !(std::fabs(seen.flat()[i] - value) <= near * std::max(std::fabs(value), typical));
  }
  return wrong;
}

/// Runs in which most elements are wrong; empty if that is nowhere, everywhere or here and there.
std::vector<ElementRun> runs_in(const std::vector<bool>& wrong) {
  std::vector<ElementRun> runs;
  std::vector<std::int64_t> wrong_in;
  for (std::int64_t i = 0; i < std::ssize(wrong); ++i) {
    if (!wrong[static_cast<std::size_t>(i)]) continue;
    if (runs.empty() || i - runs.back().second > kGap) {
      if (runs.size() == kMostRuns) return {};
      runs.emplace_back(i, i);
      wrong_in.push_back(0);
    }
    runs.back().second = i;
    ++wrong_in.back();
  }
  std::int64_t in_runs = 0;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const std::int64_t length = runs[r].second - runs[r].first + 1;
    if (length < kLeastRun ||
        static_cast<double>(wrong_in[r]) < kLeastShare * static_cast<double>(length))
      return {};
    in_runs += length;
  }
  const auto all = static_cast<double>(wrong.size());
  return static_cast<double>(in_runs) > (1 - kLeastOfTensor) * all ? std::vector<ElementRun>()
                                                                   : runs;
}

/// "262144..524287, 786432..917503, ...".
std::string runs_in_words(const std::vector<ElementRun>& runs) {
  constexpr std::size_t kShown = 3;
  std::vector<std::string> words;
  for (const auto& [first, last] : runs) {
    words.push_back(words.size() == kShown ? "..." : fmt::format("{}..{}", first, last));
    if (words.size() > kShown) break;
  }
  return fmt::format("{}", fmt::join(words, ", "));
}

/// Whether what is wrong on a rank is right on another one, but for a few elements.
bool has_right_copies(const std::vector<std::vector<bool>>& wrong) {
  constexpr double kMostEverywhere = 0.02;
  std::int64_t somewhere = 0, everywhere = 0;
  for (std::size_t i = 0; i < wrong.front().size(); ++i) {
    const auto is_wrong = [i](const std::vector<bool>& own) { return own[i]; };
    if (std::ranges::any_of(wrong, is_wrong)) ++somewhere;
    if (std::ranges::all_of(wrong, is_wrong)) ++everywhere;
  }
  return static_cast<double>(everywhere) <= kMostEverywhere * static_cast<double>(somewhere);
}

}  // namespace

std::string cause_part_differs(const Evidence& e) {
  const View* const bad = e.first_bad_view();
  if (bad == nullptr) return "";
  const double near = 4 * std::min(e.tolerance(), 0.02);
  for (const Axis axis : e.result.differing_axes) {
    std::vector<std::vector<bool>> wrong;
    std::vector<std::string> words;
    bool fits = true;
    for (const int rank : e.actual.mesh.group_of(bad->rank, axis)) {
      const View* const view = e.view_of(rank);
      const bool is_bad = std::ranges::find(e.bad_ranks(), rank) != e.bad_ranks().end();
      // what was not kept is right
      if (view == nullptr && !is_bad && e.held_by(rank) != nullptr) {
        wrong.emplace_back(static_cast<std::size_t>(bad->actual.numel()), false);
        continue;
      }
      fits = view != nullptr && view->box.size == bad->box.size &&
             view->box.global_offset == bad->box.global_offset;
      if (!fits) break;
      wrong.push_back(wrong_elements(*view, near));
      if (std::ranges::find(wrong.back(), true) == wrong.back().end()) continue;
      const std::vector<ElementRun> runs = runs_in(wrong.back());
      fits = !runs.empty();
      if (!fits) break;
      words.push_back(fmt::format("elements {} on {} rank {}", runs_in_words(runs), name_of(axis),
                                  e.actual.mesh.coordinate(rank, axis)));
    }
    if (!fits || words.empty() || wrong.size() < 2 || !has_right_copies(wrong)) continue;
    return fmt::format(
        "copies differ over {} in a part of the elements, which another rank has right and which "
        "has not reached the others: {}",
        name_of(axis), fmt::join(words, "; "));
  }
  return "";
}

}  // namespace isoshard::detail
