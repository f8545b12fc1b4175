// SPDX-License-Identifier: Apache-2.0
/// One pass over two runs of elements: everything a verdict needs to know of how they differ.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/base/dtype.h"

namespace isoshard {

/// Sums are over elements that are finite on both sides, in fp64. Merging two is adding them up
/// (see merge).
struct Stats {
  std::int64_t numel = 0;
  /// Elements whose bits differ (after division by grad_scale, when that is not 1).
  std::int64_t unequal_bits = 0;
  /// Elements whose values differ: -0 equals +0, and a NaN equals a NaN.
  std::int64_t unequal_values = 0;
  std::int64_t nan_reference = 0, nan_actual = 0;  ///< NaN
  std::int64_t inf_reference = 0, inf_actual = 0;  ///< infinite
  /// Non-finite on one side only, or not the same infinity. Always a failure.
  std::int64_t nonfinite_mismatch = 0;
  double max_abs = 0;  ///< largest abs(actual - reference)
  /// Largest difference in steps of the coarser dtype at the reference's magnitude.
  double max_ulp = 0;
  double sum_sq_reference = 0, sum_sq_actual = 0, sum_sq_diff = 0, dot = 0;
  double sum_abs_diff = 0;
  double max_abs_reference = 0;
  /// Global index of the first element whose value differs; -1: none.
  std::int64_t first_unequal = -1;
  std::int64_t worst = -1;  ///< global index of max_abs; -1: no finite difference
  double sum_diff = 0;      ///< of actual - reference, with sign: what a constant shift adds to

  [[nodiscard]] double relative_error()
      /// Sqrt(sum_sq_diff / sum_sq_reference); 0 if both are 0; inf if only the reference is 0.
      const noexcept;
  /// Best-fit factor: dot / sum_sq_reference; 1 if the reference is 0.
  [[nodiscard]] double scale() const noexcept;
  [[nodiscard]] double cosine() const noexcept;
};

/// Adds one contiguous run. `index` is the global flat index of its first element. actual is
/// divided by `grad_scale` (in fp64, not rounded) before it is compared. `selected`, if given,
/// holds one byte per element; elements whose byte is 0 are left out of everything, numel included.
///
/// Determinism   a run's result depends on its values only: never on alignment, on the CPU or on
///               MXCSR (saved and restored).
void accumulate(Stats& stats, const std::byte* reference, Dtype reference_dtype,
                const std::byte* actual, Dtype actual_dtype, std::int64_t count, std::int64_t index,
                double grad_scale = 1.0, const std::uint8_t* selected = nullptr);

/// The element at `position` of a buffer as a double (an int64 beyond 2^53 is rounded).
[[nodiscard]] double value_at(const std::byte* data, Dtype dtype, std::int64_t position) noexcept;

/// Merges b into a.
void merge(Stats& a, const Stats& b) noexcept;

/// XXH3-64 of bytes, chained by seed.
[[nodiscard]] std::uint64_t digest_of(const std::byte* data, std::size_t bytes,
                                      std::uint64_t seed = 0) noexcept;

}  // namespace isoshard
