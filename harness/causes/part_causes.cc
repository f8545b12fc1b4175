// SPDX-License-Identifier: Apache-2.0
/// A part of a tensor that did not reach a rank: copies are equal but for runs of elements, and in
/// each of them at least one rank has the right values.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/ids/phrase.h"

namespace isoshard::detail {
namespace {

/// Elements that follow each other in the flattened tensor, first and last.
using ElementRun = std::pair<std::int64_t, std::int64_t>;

constexpr std::int64_t kBlock = 64;     ///< elements that are right or wrong together
constexpr std::int64_t kGap = 4;        ///< right blocks between two wrong ones of a run
constexpr std::int64_t kLeastRun = 32;  ///< fewer are single elements
constexpr std::size_t kMostRuns = 64;   ///< more are scattered
constexpr double kLeastShare = 0.5;     ///< of a run's elements that are wrong
constexpr double kLeastOfTensor = 0.05;
constexpr double kClearly = 4;  ///< tolerances

/// A copy's elements, of which 16 bits may have moved each a little, and blocks of them.
class Copy {
 public:
  Copy(const View& view, double near)
      : seen_(view.actual.contiguous()),
        right_(view.expected.contiguous()),
        near_(near),
        typical_(norm_of(right_) / std::sqrt(static_cast<double>(right_.numel()))) {}

  [[nodiscard]] std::vector<bool> wrong_blocks() const {
    std::vector<bool> wrong;
    for (std::int64_t begin = 0; begin < seen_.numel(); begin += kBlock) {
      double error = 0, size = 0;
      for (std::int64_t i = begin; i < std::min(begin + kBlock, seen_.numel()); ++i) {
        error += std::pow(at(seen_, i) - at(right_, i), 2);
        size += std::pow(at(right_, i), 2);
      }
      wrong.push_back(!(std::sqrt(error) <= kClearly * near_ * std::sqrt(size)));
    }
    return wrong;
  }

  /// Of blocks that are wrong; empty if that is nowhere, everywhere or here and there.
  [[nodiscard]] std::vector<ElementRun> runs_in(const std::vector<bool>& wrong) const {
    std::vector<ElementRun> blocks, runs;
    for (std::int64_t b = 0; b < std::ssize(wrong); ++b) {
      if (!wrong[static_cast<std::size_t>(b)]) continue;
      if (blocks.empty() || b - blocks.back().second > kGap) blocks.emplace_back(b, b);
      blocks.back().second = b;
    }
    if (blocks.size() > kMostRuns) return {};
    std::int64_t in_runs = 0;
    for (const auto& [first, last] : blocks) {
      // a run need not begin or end with a block
      std::int64_t begin = std::max<std::int64_t>(0, (first - 1) * kBlock),
                   end = std::min(seen_.numel(), (last + 2) * kBlock) - 1, count = 0;
      while (begin < end && !is_wrong(begin)) ++begin;
      while (end > begin && !is_wrong(end)) --end;
      for (std::int64_t i = begin; i <= end; ++i) count += is_wrong(i) ? 1 : 0;
      const std::int64_t length = end - begin + 1;
      if (length < kLeastRun ||
          static_cast<double>(count) < kLeastShare * static_cast<double>(length))
        return {};
      in_runs += length;
      runs.emplace_back(begin, end);
    }
    return static_cast<double>(in_runs) > (1 - kLeastOfTensor) * static_cast<double>(seen_.numel())
               ? std::vector<ElementRun>()
               : runs;
  }

 private:
  static double at(const Values& values, std::int64_t i) {
    return values.flat()[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] bool is_wrong(std::int64_t i) const {
    const double right = at(right_, i);
    return !(std::fabs(at(seen_, i) - right) <= near_ * std::max(std::fabs(right), typical_));
  }

  Values seen_, right_;
  double near_, typical_;
};

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

/// Whether blocks that are wrong on a rank are right on another one, but for a few.
bool has_right_copies(const std::vector<std::vector<bool>>& wrong) {
  constexpr double kMostEverywhere = 0.1;  // blocks may lie on the border of two runs
  std::int64_t somewhere = 0, everywhere = 0;
  for (std::size_t i = 0; i < wrong.front().size(); ++i) {
    const auto is_wrong = [i](const std::vector<bool>& own) { return own[i]; };
    if (std::ranges::any_of(wrong, is_wrong)) ++somewhere;
    if (std::ranges::all_of(wrong, is_wrong)) ++everywhere;
  }
  return static_cast<double>(everywhere) <= kMostEverywhere * static_cast<double>(somewhere);
}

}  // namespace

Cause cause_part_differs(const Evidence& e) {
  const View* const bad = e.first_bad_view();
  if (bad == nullptr) return {};
  const double near = 4 * std::min(e.tolerance(), 0.02);
  for (const Axis axis : e.result.differing_axes) {
    std::vector<std::vector<bool>> wrong;
    std::vector<std::string> words;
    std::vector<int> coordinates;
    std::vector<std::int64_t> begins, ends;
    bool fits = true;
    for (const int rank : e.actual.mesh.group_of(bad->rank, axis)) {
      const View* const view = e.view_of(rank);
      const bool is_bad = std::ranges::find(e.bad_ranks(), rank) != e.bad_ranks().end();
      // what was not kept is right
      if (view == nullptr && !is_bad && e.held_by(rank) != nullptr) {
        wrong.emplace_back(static_cast<std::size_t>((bad->actual.numel() + kBlock - 1) / kBlock));
        continue;
      }
      fits = view != nullptr && view->box.size == bad->box.size &&
             view->box.global_offset == bad->box.global_offset;
      if (!fits) break;
      const Copy copy(*view, near);
      wrong.push_back(copy.wrong_blocks());
      if (std::ranges::find(wrong.back(), true) == wrong.back().end()) continue;
      const std::vector<ElementRun> runs = copy.runs_in(wrong.back());
      fits = !runs.empty();
      if (!fits) break;
      for (const auto& [first, last] : runs) {
        begins.push_back(first);
        ends.push_back(last);
      }
      coordinates.push_back(e.actual.mesh.coordinate(rank, axis));
      words.push_back(phrase(PhraseId::kElementsOnRank, {{"elements", runs_in_words(runs)},
                                                         {"axis", name_of(axis)},
                                                         {"coordinate", coordinates.back()}}));
    }
    if (!fits || words.empty() || wrong.size() < 2 || !has_right_copies(wrong)) continue;
    return make_cause(CauseId::kPartNotReached,
                      {{"axis", name_of(axis)},
                       {"coordinates", coordinates},
                       {"begins", begins},
                       {"ends", ends},
                       NamedValue::words("elements", fmt::format("{}", fmt::join(words, "; ")))});
  }
  return {};
}

}  // namespace isoshard::detail
