// SPDX-License-Identifier: Apache-2.0
/// One search for what was done to a tensor: hypotheses are compared by the bits that it takes to
/// say what the ranks hold.
///
/// Without a hypothesis each element that is off costs the logarithm of how far off it is, in units
/// of what roundings may do. A hypothesis costs what it takes to name its operation, its number and
/// its extent, and leaves less to be said of the elements. The one that saves most is the best, and
/// it is taken only if it leaves no element unexplained and saves at least kLeastSaved bits.
///
/// Determinism   a function of its arguments.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/mesh/layout.h"

namespace isoshard::detail {

/// A hypothesis with fewer is as likely to fit noise.
inline constexpr double kLeastSaved = 10;

/// One box of a tensor on one rank, in row-major order. All spans have numel_of(shape) elements.
struct ComparedBox {
  Shape shape;
  std::span<const double> actual, expected;
  /// The search compares what was added to these values, such as a parameter before its step.
  /// Empty: zeros.
  std::span<const double> base = {};
};

/// A part of a box: a run of its elements in row-major order, or positions of one dim.
struct Extent {
  std::int64_t dim = -1;  ///< -1: a run of elements
  std::int64_t first = 0, last = 0;
  friend bool operator==(const Extent&, const Extent&) = default;
};

/// What was done to the elements of an extent: made 0; multiplied by a number; a number added to
/// each; moved on by some places, those at the end to the beginning; rounded to some bits.
enum class Change : std::uint8_t { kZero, kScale, kOffset, kShift, kRound };

struct Hypothesis {
  Change change = Change::kZero;
  double number = 0;     ///< the factor, the offset, the places, the bits; 0 of kZero
  bool is_whole = true;  ///< all elements of the ranks that are wrong
  std::vector<std::size_t> boxes = {};  ///< those that are wrong, as places in the input
  std::vector<Extent> where = {};       ///< one for each of `boxes`
  double saved = 0;                     ///< bits
};

/// The best hypothesis; none if no element is off, or if none explains all elements and saves
/// kLeastSaved bits, or if fewer than a quarter of the elements of its extent are off.
///
/// `relative`   what roundings may do to an element, as a share of its size or of the root mean
///              square of its box, whichever is larger; above 0.
[[nodiscard]] std::optional<Hypothesis> best_hypothesis(std::span<const ComparedBox> boxes,
                                                        double relative);

/// Where boxes are wrong, if they are right elsewhere.
struct WrongPart {
  std::vector<std::size_t> boxes = {};  ///< those that are wrong, as places in the input
  std::vector<Extent> where = {};       ///< one for each of `boxes`
  std::int64_t most = 0;                ///< wrong elements of the box that has most
};

/// The part that has all wrong elements: of runs and dims the one with the fewest elements. None if
/// no element is off, if the part is more than half of a box, if fewer than half of its elements
/// are off, or unless its errors are typically 16 times the largest one outside: noise that is
/// larger here and there is no part.
[[nodiscard]] std::optional<WrongPart> wrong_part(std::span<const ComparedBox> boxes,
                                                  double relative);

}  // namespace isoshard::detail
