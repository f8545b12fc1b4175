// SPDX-License-Identifier: Apache-2.0
/// Parts of a tensor: what was done to one, found by the search; and a part that did not reach a
/// rank: copies are equal but for runs of elements, and in each of them at least one rank has the
/// right values.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "harness/causes/class_causes.h"
#include "harness/causes/engine/search.h"
#include "harness/ids/phrase.h"
#include "harness/trace/masked_steps.h"
#include "harness/trace/stage.h"

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
  const double near = 4 * e.noise();
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

namespace {

constexpr std::int64_t kMostElements = 1 << 22;  ///< of all boxes that are searched
constexpr std::int64_t kLeastRight = 8;          ///< elements beside a single wrong one

/// The wrong boxes of a tensor, and what a step adds to, if it is one that is stepped. Equal copies
/// count once: they have one error, not several that agree.
class Boxes {
 public:
  explicit Boxes(const Evidence& e) : relative_(e.noise()) {
    std::int64_t elements = 0;
    for (const View* const view : e.bad_views()) {
      if (is_copy(*view)) continue;
      views_.push_back(view);
      elements += view->actual.numel();
    }
    if (elements > kMostElements) views_.clear();
    for (const View* const view : views_) {
      actual_.push_back(view->actual.contiguous());
      expected_.push_back(view->expected.contiguous());
    }
    const bool is_stepped = !stepped_parameter(e.wanted.key).empty();
    const RecordKey before = before_step(e.wanted.key);
    if (is_stepped && e.reference.find(before) != nullptr) {
      const Values old = e.reference_value(before);
      for (const View* const view : views_)
        base_.push_back(old.cut(view->box.global_offset, view->box.size).contiguous());
    }
    compare_with_right_copies(e, before);
  }

  [[nodiscard]] bool empty() const { return views_.empty(); }
  /// The largest rounding error of an element, as a share of it.
  [[nodiscard]] double relative() const { return relative_; }
  [[nodiscard]] bool has_base() const { return !base_.empty(); }
  [[nodiscard]] const View& view(std::size_t i) const { return *views_[i]; }
  /// What a step adds is compared, or the values themselves.
  [[nodiscard]] std::vector<ComparedBox> compared(bool with_base) const {
    std::vector<ComparedBox> boxes;
    for (std::size_t i = 0; i < views_.size(); ++i) {
      boxes.push_back({views_[i]->box.size, actual_[i].flat(), expected_[i].flat()});
      if (with_base) boxes.back().base = base_[i].flat();
    }
    return boxes;
  }
  [[nodiscard]] double base(std::size_t box, std::int64_t element) const {
    return has_base() ? base_[box].flat()[static_cast<std::size_t>(element)] : 0;
  }
  [[nodiscard]] double actual(std::size_t box, std::int64_t element) const {
    return actual_[box].flat()[static_cast<std::size_t>(element)];
  }
  [[nodiscard]] double expected(std::size_t box, std::int64_t element) const {
    return expected_[box].flat()[static_cast<std::size_t>(element)];
  }

 private:
  [[nodiscard]] bool is_copy(const View& view) const {
    return std::ranges::any_of(views_, [&](const View* known) {
      return known->box.global_offset == view.box.global_offset &&
             known->box.size == view.box.size && equal(known->actual, view.actual);
    });
  }

  /// A copy that is right differs by no rounding, so it shows more than the reference.
  void compare_with_right_copies(const Evidence& e, const RecordKey& before) {
    std::vector<Values> expected, base;
    double relative = 0;
    for (const View* const view : views_) {
      const auto right = std::ranges::find_if(e.views, [&](const View& other) {
        return other.box.global_offset == view->box.global_offset &&
               other.box.size == view->box.size &&
               std::ranges::find(e.bad_ranks(), other.rank) == e.bad_ranks().end();
      });
      const Held* const held = right == e.views.end() ? nullptr : e.held_by(right->rank);
      if (held == nullptr) return;
      expected.push_back(right->actual.contiguous());
      const Dtype dtype = held->record->dtype;
      relative = std::max(relative, unit_roundoff(is_floating(dtype) ? dtype : Dtype::kFloat32));
      if (base_.empty()) continue;
      const Record* const old = held->rank->find(before);
      const auto box = old == nullptr ? std::nullopt : e.own_box(*held->rank, *old);
      const bool is_known = box && box->first.size == view->box.size &&
                            box->first.global_offset == view->box.global_offset;
      base.push_back(is_known ? box->second.contiguous() : base_[base.size()]);
    }
    if (expected.empty()) return;
    expected_ = std::move(expected);
    base_ = std::move(base);
    relative_ = relative;
  }

  std::vector<const View*> views_;
  std::vector<Values> actual_, expected_, base_;
  double relative_;
};

/// A factor and a difference that change one element into another.
NamedValues alternatives(double expected, double actual) {
  NamedValues values = {{"offset", actual - expected}};
  if (expected == 0) return values;
  values.emplace_back("scale", actual / expected);
  values.push_back(NamedValue::words("or_factor", phrase(PhraseId::kOrFactor, values)));
  return values;
}

/// Whether the parts of ranks are changed at the same place in each: one place can be named.
bool is_one_place(const std::vector<Extent>& where) {
  return std::ranges::all_of(where, [&](const Extent& extent) { return extent == where.front(); });
}

/// Where the first wrong box is changed: slices of a dim as places of the whole tensor, or elements
/// of the box in row-major order.
NamedValues values_of(const Boxes& boxes, std::size_t box, const Extent& extent) {
  const bool is_run = extent.dim < 0;
  const std::int64_t offset =
      is_run ? 0 : boxes.view(box).box.global_offset[static_cast<std::size_t>(extent.dim)];
  const std::int64_t first = extent.first + offset, last = extent.last + offset;
  NamedValues values = {{"first", first}, {"last", last}, {"count", last - first + 1}};
  values.push_back(NamedValue::words(
      "range", first == last ? fmt::format("{}", first) : fmt::format("{}..{}", first, last)));
  if (!is_run) values.emplace_back("dim", extent.dim);
  values.push_back(NamedValue::words(
      "where", phrase(is_run ? PhraseId::kElementRun : PhraseId::kSlicesOfDim, values)));
  return values;
}

NamedValues values_of(const Evidence& e, const Boxes& boxes, const Hypothesis& best, bool of_step) {
  NamedValues values;
  if (best.is_whole) {
    values.push_back(NamedValue::words("where", phrase(PhraseId::kAllElements)));
  } else {
    values = values_of(boxes, best.boxes.front(), best.where.front());
    values.push_back(NamedValue::words("others", phrase(PhraseId::kRestIsRight)));
  }
  if (of_step) {
    values.emplace_back("base", "step");
    values.push_back(NamedValue::words("of_step", phrase(PhraseId::kOfWhatTheStepAdds)));
  }
  values.push_back(e.on_bad_ranks());
  return values;
}

Cause cause_of(const Evidence& e, const Boxes& boxes, const Hypothesis& best, bool of_step) {
  if (!best.is_whole && !is_one_place(best.where)) return {};
  NamedValues values = values_of(e, boxes, best, of_step);
  switch (best.change) {
    case Change::kZero:
    case Change::kScale: {
      if (best.change == Change::kZero && !of_step) return {};  // cause_zeros counts them
      values.emplace_back("scale", best.number);
      constexpr double kNear = 1e-4;
      if (const auto formula = e.formula_of(best.number, kNear)) {
        values.emplace_back("formula", *formula);
        values.push_back(
            NamedValue::words("is_formula", phrase(PhraseId::kIsFormula, {{"formula", *formula}})));
      }
      return make_cause(CauseId::kPartScaled, std::move(values));
    }
    case Change::kOffset:
      values.emplace_back("offset", best.number);
      return make_cause(CauseId::kPartOffset, std::move(values));
    case Change::kShift:
      values.emplace_back("shift", static_cast<std::int64_t>(best.number));
      return make_cause(CauseId::kPartMoved, std::move(values));
    case Change::kRound:
      values.emplace_back("dtype", best.number == 8 ? "bf16" : "fp16");
      return make_cause(CauseId::kPartRounded, std::move(values));
  }
  return {};
}

/// An activation, or its gradient, that is changed everywhere on the wrong ranks.
Cause cause_of_whole(const Evidence& e, const Boxes& boxes, const Hypothesis& best) {
  switch (best.change) {
    case Change::kZero:
      return e.scale_cause(0, {e.on_bad_ranks()});
    case Change::kScale:
      return cause_scale(e);
    case Change::kOffset:
      return make_cause(CauseId::kConstantOffset,
                        {{"offset", best.number}, {"rank", boxes.view(best.boxes.front()).rank}});
    default:
      return {};
  }
}

/// A tensor of which one element of each wrong box is off.
Cause cause_of_one(const Evidence& e, const Boxes& boxes) {
  const auto part = wrong_part(boxes.compared(false), boxes.relative());
  if (!part || part->most != 1 || !is_one_place(part->where)) return {};
  const std::size_t box = part->boxes.front();
  const std::int64_t element = part->where.front().first;
  const bool is_run = part->where.front().dim < 0;
  if (!is_run || boxes.view(box).actual.numel() <= kLeastRight) return {};
  if (boxes.actual(box, element) == 0) return {};  // cause_zeros counts it
  const double base = boxes.base(box, element);
  NamedValues values =
      alternatives(boxes.expected(box, element) - base, boxes.actual(box, element) - base);
  values.emplace_back("index", index_of(boxes.view(box).box, element));
  if (boxes.has_base()) {
    values.emplace_back("base", "step");
    values.push_back(NamedValue::words("of_step", phrase(PhraseId::kOfWhatTheStepAdds)));
  }
  values.push_back(e.on_bad_ranks());
  return make_cause(CauseId::kOneElementWrong, std::move(values));
}

}  // namespace

Cause cause_changed_part(const Evidence& e) {
  if (e.wanted.key.kind == RecordKind::kScalar) return {};
  const Boxes boxes(e);
  if (boxes.empty()) return {};
  std::optional<Hypothesis> best = best_hypothesis(boxes.compared(false), boxes.relative());
  bool of_step = false;
  if (boxes.has_base()) {
    const auto of_added = best_hypothesis(boxes.compared(true), boxes.relative());
    of_step = of_added && (!best || of_added->saved > best->saved);
    if (of_step) best = of_added;
  }
  if (!best) return cause_of_one(e, boxes);
  if (!best->is_whole || of_step) return cause_of(e, boxes, *best, of_step);
  const bool is_activation = e.wanted.key.kind == RecordKind::kActivation ||
                             e.wanted.key.kind == RecordKind::kActivationGrad;
  const bool is_offset_step = boxes.has_base() && best->change == Change::kOffset;
  return is_activation || is_offset_step ? cause_of_whole(e, boxes, *best) : Cause();
}

Cause cause_wrong_part(const Evidence& e) {
  const Boxes boxes(e);
  if (boxes.empty()) return {};
  const auto part = wrong_part(boxes.compared(false), boxes.relative());
  if (!part || !is_one_place(part->where)) return {};
  NamedValues values = values_of(boxes, part->boxes.front(), part->where.front());
  values.push_back(e.on_bad_ranks());
  return make_cause(CauseId::kPartWrong, std::move(values));
}

}  // namespace isoshard::detail
