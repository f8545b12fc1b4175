// SPDX-License-Identifier: Apache-2.0
/// What the loops of a CPU and the kernels of a GPU say of a block in the same words; internal to
/// stats. All of it is constexpr, so that a GPU can run it.
#pragma once
#include <bit>
#include <cstdint>

#include "harness/stats/stats.h"

namespace isoshard {

/// How large one step of a dtype is: 2^(e - fraction_bits) for a value of exponent e, e never below
/// min_exponent.
struct Steps {
  int fraction_bits = 0;
  int min_exponent = 0;
};

/// Of the coarser dtype.
[[nodiscard]] Steps steps_of(Dtype reference_dtype, Dtype actual_dtype) noexcept;

/// Magnitudes of fp32, as bits, whose products keep 20 bits in fp32 and whose sums over a block do
/// not overflow.
[[nodiscard]] constexpr bool in_range(std::int32_t magnitude) noexcept {
  constexpr auto kLeast = std::bit_cast<std::int32_t>(0x1p-60F);
  constexpr auto kMost = std::bit_cast<std::int32_t>(0x1p60F);
  return magnitude == 0 || (magnitude >= kLeast && magnitude < kMost);
}

/// The largest difference is at most a 16th of the largest reference, so that sums over actual
/// follow from those over reference and difference without cancellation.
[[nodiscard]] constexpr bool are_close(std::int32_t max_diff, std::int32_t max_reference) noexcept {
  return max_diff + (4 << 23) <= max_reference;
}

/// 2^exponent.   Requires   -1022 <= exponent <= 1023.
[[nodiscard]] constexpr double power_of_two(int exponent) noexcept {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

/// BlockOfDifferences::max_key as steps: an upper bound of the largest difference in steps of the
/// reference, sharp but for subnormal differences.
[[nodiscard]] constexpr double steps_of_key(std::int32_t key, int fraction_bits) noexcept {
  return (1.0 + static_cast<double>(key & 0x7fffff) * 0x1p-23) *
         power_of_two((key >> 23) + fraction_bits);
}

/// abs(actual - reference) of two fp32, as `difference`, in steps at the reference's magnitude.
[[nodiscard]] constexpr double steps_between(float reference, float difference,
                                             const Steps& steps) noexcept {
  constexpr int kBiasOfFloat = 127;
  const auto exponent_field =
      static_cast<int>(std::bit_cast<std::uint32_t>(reference) >> 23 & 0xffU) - kBiasOfFloat;
  const int exponent = exponent_field > steps.min_exponent ? exponent_field : steps.min_exponent;
  // 2^(fraction bits - exponent), between 2^-120 and 2^149, so that the product is exact.
  const double magnitude = static_cast<double>(difference < 0 ? -difference : difference);
  return magnitude * power_of_two(steps.fraction_bits - exponent);
}

/// merge(), where a GPU can run it.
constexpr void merge_into(Stats& a, const Stats& b) noexcept {
  const auto larger = [](double x, double y) { return x < y ? y : x; };
  a.numel += b.numel;
  a.unequal_bits += b.unequal_bits;
  a.unequal_values += b.unequal_values;
  a.nan_reference += b.nan_reference;
  a.nan_actual += b.nan_actual;
  a.inf_reference += b.inf_reference;
  a.inf_actual += b.inf_actual;
  a.nonfinite_mismatch += b.nonfinite_mismatch;
  if (b.max_abs > a.max_abs ||
      (b.max_abs == a.max_abs && b.worst >= 0 && (a.worst < 0 || b.worst < a.worst)))
    a.worst = b.worst;
  a.max_abs = larger(a.max_abs, b.max_abs);
  a.max_ulp = larger(a.max_ulp, b.max_ulp);
  a.sum_sq_reference += b.sum_sq_reference;
  a.sum_sq_actual += b.sum_sq_actual;
  a.sum_sq_diff += b.sum_sq_diff;
  a.dot += b.dot;
  a.sum_abs_diff += b.sum_abs_diff;
  a.sum_diff += b.sum_diff;
  a.max_abs_reference = larger(a.max_abs_reference, b.max_abs_reference);
  if (b.first_unequal >= 0 && (a.first_unequal < 0 || b.first_unequal < a.first_unequal))
    a.first_unequal = b.first_unequal;
}

}  // namespace isoshard
