// SPDX-License-Identifier: Apache-2.0
#include "harness/causes/engine/search.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "harness/causes/view/values.h"

namespace isoshard::detail {
namespace {

constexpr std::int64_t kMostPlaces = 8;  ///< of a shift
constexpr double kWrong = 4;             ///< in units of what roundings may do
constexpr double kClearly = 16;          ///< times the largest error outside of a wrong part
constexpr double kLeastSeen = 0.25;      ///< share of an extent's elements that are off
constexpr std::array kChanges = {Change::kZero, Change::kScale, Change::kOffset, Change::kShift,
                                 Change::kRound};
constexpr std::array kMantissas = {8, 11};  ///< bf16, fp16: the leading bit counts

double log2_of(std::int64_t count) {
  return std::log2(static_cast<double>(std::max<std::int64_t>(count, 1)));
}

/// Bits of one of the runs in `size` places.
double bits_of_run(std::int64_t size) {
  return log2_of(size) + log2_of(size + 1) - 1;
}

/// Bits of an error of so many units.
double bits_of_error(double units) {
  return 0.5 * std::log2(1 + units * units);
}

/// One target that is off, with what the search needs of each element.
struct Wrong {
  const ComparedBox* target;
  std::vector<double> unit = {};            ///< what roundings may do
  std::vector<std::int64_t> elements = {};  ///< that are off
  double bits = 0;                          ///< of its errors

  [[nodiscard]] double base(std::int64_t i) const {
    return target->base.empty() ? 0 : target->base[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] double seen(std::int64_t i) const {
    return target->actual[static_cast<std::size_t>(i)] - base(i);
  }
  [[nodiscard]] double right(std::int64_t i) const {
    return target->expected[static_cast<std::size_t>(i)] - base(i);
  }
  [[nodiscard]] std::int64_t count() const {
    return static_cast<std::int64_t>(target->actual.size());
  }
  [[nodiscard]] std::int64_t dims() const { return std::ssize(target->shape); }
};

Wrong looked_at(const ComparedBox& target, double relative) {
  Wrong wrong{.target = &target};
  double squares = 0;
  for (const double value : target.expected) squares += value * value;
  const double typical =
      std::sqrt(squares / static_cast<double>(std::max<std::size_t>(target.expected.size(), 1)));
  for (std::size_t i = 0; i < target.actual.size(); ++i) {
    const double unit = relative * std::max(std::fabs(target.expected[i]), typical);
    wrong.unit.push_back(unit > 0 ? unit : relative);
    const double units = std::fabs(target.actual[i] - target.expected[i]) / wrong.unit.back();
    wrong.bits += bits_of_error(units);
    if (!(units <= kWrong)) wrong.elements.push_back(static_cast<std::int64_t>(i));
  }
  return wrong;
}

/// How far apart neighbors along a dim are, in row-major order.
std::int64_t stride_of(const Shape& shape, std::int64_t dim) {
  std::int64_t stride = 1;
  for (std::size_t d = static_cast<std::size_t>(dim) + 1; d < shape.size(); ++d) stride *= shape[d];
  return stride;
}

std::int64_t size_of(const Wrong& wrong, std::int64_t dim) {
  return dim < 0 ? wrong.count() : wrong.target->shape[static_cast<std::size_t>(dim)];
}

/// The place of an element along a dim.
std::int64_t place_of(const Wrong& wrong, std::int64_t dim, std::int64_t element) {
  if (dim < 0) return element;
  return element / stride_of(wrong.target->shape, dim) % size_of(wrong, dim);
}

/// The smallest extent along a dim that has all elements that are off.
Extent around(const Wrong& wrong, std::int64_t dim) {
  Extent extent{dim, size_of(wrong, dim), -1};
  for (const std::int64_t element : wrong.elements) {
    const std::int64_t place = place_of(wrong, dim, element);
    extent.first = std::min(extent.first, place);
    extent.last = std::max(extent.last, place);
  }
  return extent;
}

/// The extents that all targets share the kind of: everything, or a part along one dim.
struct Extents {
  std::vector<Extent> of;  ///< one for each target
  double bits = 0;
  bool is_whole = false;
};

/// Bits of the extents of one kind, of which equal ones are said once.
Extents parts_of(std::span<const Wrong> wrong, std::vector<Extent> of, double bits_of_kind) {
  Extents extents{std::move(of), bits_of_kind, true};
  for (std::size_t k = 0; k < wrong.size(); ++k) {
    const Extent& extent = extents.of[k];
    const std::int64_t size = size_of(wrong[k], extent.dim);
    const auto here = extents.of.begin() + static_cast<std::ptrdiff_t>(k);
    if (std::find(extents.of.begin(), here, extent) == here) extents.bits += bits_of_run(size);
    extents.is_whole = extents.is_whole && extent.first == 0 && extent.last == size - 1;
  }
  return extents;
}

/// One extent for all boxes of a shape: where an end of a part hides in noise on one rank, another
/// rank may show it.
std::vector<Extent> united(std::span<const Wrong> wrong, std::vector<Extent> of) {
  for (std::size_t k = 0; k < wrong.size(); ++k) {
    for (std::size_t other = 0; other < wrong.size(); ++other) {
      if (wrong[k].target->shape != wrong[other].target->shape) continue;
      of[k].first = std::min(of[k].first, of[other].first);
      of[k].last = std::max(of[k].last, of[other].last);
    }
  }
  return of;
}

std::vector<Extents> extents_of(std::span<const Wrong> wrong) {
  const std::int64_t dims = wrong.front().dims();
  const bool have_dims =
      dims > 1 && std::ranges::all_of(wrong, [&](const Wrong& w) { return w.dims() == dims; });
  const double bits_of_kind = std::log2(static_cast<double>(have_dims ? dims + 2 : 2));
  std::vector<Extents> all(1);
  all[0] = {{}, bits_of_kind, true};
  for (const Wrong& w : wrong) all[0].of.push_back({-1, 0, w.count() - 1});
  // The first dim of a box is a run of its elements, too, and takes fewer bits.
  for (std::int64_t dim = -1; dim < (have_dims ? dims : 0); ++dim) {
    std::vector<Extent> of;
    for (const Wrong& w : wrong) of.push_back(around(w, dim));
    std::vector<Extent> one = united(wrong, of);
    const bool is_other = one != of;
    for (std::vector<Extent>* extents : {&of, &one}) {
      if (extents == &one && !is_other) continue;
      Extents parts = parts_of(wrong, std::move(*extents), bits_of_kind);
      if (!parts.is_whole) all.push_back(std::move(parts));
    }
  }
  return all;
}

/// Calls `act` with each element of an extent.
template <class Act>
void for_each(const Wrong& wrong, const Extent& extent, const Act& act) {
  for (std::int64_t i = 0; i < wrong.count(); ++i) {
    const std::int64_t place = place_of(wrong, extent.dim, i);
    if (place >= extent.first && place <= extent.last) act(i);
  }
}

/// The element that stands at an element's place after a shift within the extent.
std::int64_t moved_from(const Wrong& wrong, const Extent& extent, std::int64_t element,
                        std::int64_t places) {
  const std::int64_t length = extent.last - extent.first + 1;
  const std::int64_t place = place_of(wrong, extent.dim, element);
  const std::int64_t from =
      extent.first + ((place - extent.first - places) % length + length) % length;
  const std::int64_t stride = extent.dim < 0 ? 1 : stride_of(wrong.target->shape, extent.dim);
  return element + (from - place) * stride;
}

/// The value that a hypothesis predicts for one element of the extent, less the base.
double changed(const Wrong& wrong, const Extent& extent, std::int64_t i, Change change,
               double number) {
  switch (change) {
    case Change::kZero:
      return 0;
    case Change::kScale:
      return number * wrong.right(i);
    case Change::kOffset:
      return wrong.right(i) + number;
    case Change::kShift:
      return wrong.right(moved_from(wrong, extent, i, std::llround(number)));
    case Change::kRound:
      return rounded_to(wrong.right(i), static_cast<int>(number));
  }
  return 0;
}

/// Bits of the errors that a hypothesis leaves; nothing if it does not explain an element.
std::optional<double> bits_left(std::span<const Wrong> wrong, const Extents& extents, Change change,
                                double number) {
  double bits = 0;
  for (std::size_t k = 0; k < wrong.size(); ++k) {  // most hypotheses fail at the first wrong one
    const Wrong& w = wrong[k];
    const std::int64_t i = w.elements.front();
    const double left = std::fabs(w.seen(i) - changed(w, extents.of[k], i, change, number));
    if (!(left <= kWrong * w.unit[static_cast<std::size_t>(i)])) return std::nullopt;
  }
  for (std::size_t k = 0; k < wrong.size(); ++k) {
    const Wrong& w = wrong[k];
    const Extent& extent = extents.of[k];
    for (std::int64_t i = 0; i < w.count(); ++i) {
      const std::int64_t place = place_of(w, extent.dim, i);
      const bool is_in = place >= extent.first && place <= extent.last;
      const double predicted = is_in ? changed(w, extent, i, change, number) : w.right(i);
      // what is made 0 is 0, and nothing small
      if (is_in && change == Change::kZero && w.target->base.empty() && w.seen(i) != 0)
        return std::nullopt;
      const double left = std::fabs(w.seen(i) - predicted);
      const double unit = w.unit[static_cast<std::size_t>(i)];
      if (!(left <= kWrong * unit)) return std::nullopt;
      bits += bits_of_error(left / unit);
    }
  }
  return bits;
}

/// The numbers that fit a change best, each with the bits that it takes to say it.
struct Number {
  double value = 0;
  double bits = 0;
};

/// A number that is fitted to what the elements say with this weight in all.
Number fitted(double value, double weight, double away) {
  return {value, 1 + bits_of_error(away * std::sqrt(weight))};
}

std::vector<Number> numbers_of(std::span<const Wrong> wrong, const Extents& extents,
                               Change change) {
  if (change == Change::kZero) return {Number()};
  if (change == Change::kShift) {
    std::vector<Number> places;
    std::int64_t length = kMostPlaces + 1;
    for (const Extent& extent : extents.of)
      length = std::min(length, extent.last - extent.first + 1);
    for (std::int64_t by = 1; by < length; ++by) {
      for (const std::int64_t signed_by : {by, -by})
        places.push_back({static_cast<double>(signed_by), 1 + log2_of(kMostPlaces)});
    }
    return places;
  }
  if (change == Change::kRound) {
    std::vector<Number> mantissas;
    for (const int bits : kMantissas)
      mantissas.push_back({static_cast<double>(bits), log2_of(std::ssize(kMantissas))});
    return mantissas;
  }
  double products = 0, squares = 0;
  for (std::size_t k = 0; k < wrong.size(); ++k) {
    const Wrong& w = wrong[k];
    for_each(w, extents.of[k], [&](std::int64_t i) {
      const double unit = w.unit[static_cast<std::size_t>(i)];
      const double x = change == Change::kScale ? w.right(i) / unit : 1 / unit;
      const double y = change == Change::kScale ? w.seen(i) : w.seen(i) - w.right(i);
      products += x * y / unit;
      squares += x * x;
    });
  }
  if (!(squares > 0)) return {};
  const double value = products / squares;
  if (change == Change::kOffset) return {fitted(value, squares, value)};
  return {fitted(value, squares, value - 1)};
}

/// The boxes in which an element is off, and their places in the input.
struct WrongBoxes {
  std::vector<Wrong> wrong;
  std::vector<std::size_t> places;
};

WrongBoxes wrong_boxes(std::span<const ComparedBox> boxes, double relative) {
  WrongBoxes found;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    Wrong one = looked_at(boxes[i], relative);
    if (one.elements.empty()) continue;
    found.wrong.push_back(std::move(one));
    found.places.push_back(i);
  }
  return found;
}

/// Whether at least kLeastSeen of the elements of each extent are off: a change that can be seen on
/// a few elements alone is as likely one of another kind.
bool is_dense(std::span<const Wrong> wrong, const Extents& extents) {
  for (std::size_t k = 0; k < wrong.size(); ++k) {
    std::int64_t inside = 0;
    for_each(wrong[k], extents.of[k], [&](std::int64_t) { ++inside; });
    if (static_cast<double>(wrong[k].elements.size()) < kLeastSeen * static_cast<double>(inside))
      return false;
  }
  return true;
}

}  // namespace

std::optional<Hypothesis> best_hypothesis(std::span<const ComparedBox> boxes, double relative) {
  const WrongBoxes all = wrong_boxes(boxes, relative);
  const std::vector<Wrong>& wrong = all.wrong;
  if (wrong.empty()) return std::nullopt;
  double bits_alone = 0;
  for (const Wrong& w : wrong) bits_alone += w.bits;
  std::optional<Hypothesis> best;
  for (const Extents& extents : extents_of(wrong)) {
    if (!is_dense(wrong, extents)) continue;
    for (const Change change : kChanges) {
      for (const Number& number : numbers_of(wrong, extents, change)) {
        const double said = log2_of(std::ssize(kChanges)) + extents.bits + number.bits;
        if (bits_alone - said < std::max(kLeastSaved, best ? best->saved : 0)) continue;
        const auto left = bits_left(wrong, extents, change, number.value);
        if (!left.has_value()) continue;
        const double saved = bits_alone - said - *left;
        if (saved < kLeastSaved || (best && saved <= best->saved)) continue;
        best = Hypothesis{.change = change,
                          .number = number.value,
                          .is_whole = extents.is_whole,
                          .boxes = all.places,
                          .where = extents.of,
                          .saved = saved};
      }
    }
  }
  return best;
}

std::optional<WrongPart> wrong_part(std::span<const ComparedBox> boxes, double relative) {
  const WrongBoxes all = wrong_boxes(boxes, relative);
  if (all.wrong.empty()) return std::nullopt;
  std::optional<WrongPart> best;
  std::int64_t fewest = 0;
  for (const Extents& extents : extents_of(all.wrong)) {
    if (extents.is_whole) continue;
    std::int64_t total = 0;
    bool is_part = true;
    for (std::size_t k = 0; is_part && k < all.wrong.size(); ++k) {
      const Wrong& w = all.wrong[k];
      std::int64_t inside = 0;
      double squares = 0, largest_outside = 0;
      for (std::int64_t i = 0; i < w.count(); ++i) {
        const std::int64_t place = place_of(w, extents.of[k].dim, i);
        const double units =
            std::fabs(w.seen(i) - w.right(i)) / w.unit[static_cast<std::size_t>(i)];
        if (place < extents.of[k].first || place > extents.of[k].last) {
          largest_outside = std::max(largest_outside, units);
          continue;
        }
        ++inside;
        squares += units * units;
      }
      total += inside;
      const double typical =
          std::sqrt(squares / static_cast<double>(std::max<std::int64_t>(inside, 1)));
      is_part = 2 * inside <= w.count() && 2 * std::ssize(w.elements) >= inside &&
                typical >= kClearly * largest_outside;
    }
    if (!is_part || (best && total >= fewest)) continue;
    best = WrongPart{.boxes = all.places, .where = extents.of};
    fewest = total;
  }
  if (!best) return best;
  for (const Wrong& w : all.wrong)
    best->most = std::max<std::int64_t>(best->most, std::ssize(w.elements));
  return best;
}

}  // namespace isoshard::detail
