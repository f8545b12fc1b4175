// SPDX-License-Identifier: Apache-2.0
/// Sums of a tensor's elements with random signs. Unlike a norm they see where a value stands and
/// which sign it has (docs/reference/goldens.md, "Projections").
#pragma once
#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

namespace isoshard {

inline constexpr std::size_t kProjections = 8;
/// One sum for each of eight independent families of signs.
using Projections = std::array<double, kProjections>;

/// The distance of the projections of two tensors may be this many times the distance of the
/// tensors themselves: of tensors at their limit fewer than one in 3.5e8 is further off
/// (docs/reference/goldens.md).
inline constexpr double kProjectedFactor = 8;

/// Adds what one rank holds of a tensor to its sums.
///
/// A sign depends on the tensor's name, the rank, the element's index on that rank and the number
/// of the projection, and on nothing else: Philox4x32-10 gives 128 bits for 16 elements.
/// Determinism   the products are exact, and fp64 numbers are added in the order of elements, so
///               equal elements have equal sums on every machine.
void add_projections(Projections& sums, std::string_view tensor, int rank,
                     std::span<const double> elements) noexcept;

/// The root of the sum of squared differences; NaN if one is.
[[nodiscard]] double distance_of(const Projections& a, const Projections& b) noexcept;

/// Projections as a file holds them: whole multiples of a step that follows from `allowed`.
struct StoredProjections {
  Projections values{};
  /// How far those of a run on another machine may be from them, by distance_of.
  double allowed = 0;
};

/// Rounds to multiples of step_of(allowed), after `allowed` grew by what that can add. None where
/// nothing may differ, where a number is not finite, or where a multiple would not fit.
[[nodiscard]] std::optional<StoredProjections> stored(const Projections& exact,
                                                      double allowed) noexcept;

/// 2^-9 times the largest power of two that is at most `allowed`.
/// Requires   allowed > 0 and finite.
[[nodiscard]] double step_of(double allowed) noexcept;

}  // namespace isoshard
