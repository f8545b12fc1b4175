// SPDX-License-Identifier: Apache-2.0
/// Standard normal numbers that are the same, bit for bit, on every machine.
///
/// The inverse of the normal distribution function as piecewise polynomials: only + - x in double
/// at run time, no libm, no division, no square root, and no fused multiply-add
/// (-ffp-contract=off), so nothing rounds differently elsewhere.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace isoshard {

/// The quantile that belongs to 64 uniform bits: bit 0 is the sign, the rest (m = bits | 1, p = m /
/// 2^65) the tail probability. Accuracy   abs(result - true quantile of p) <= 1e-7 (measured: below
/// 1e-10); largest magnitude about 9.2.
/// Determinism   a pure function, symmetric in the sign.
[[nodiscard]] double normal_of_bits(std::uint64_t bits) noexcept;

/// The number that element `flat_index` of the tensor `name` gets. It depends on the three
/// arguments only.
[[nodiscard]] double standard_normal(std::uint64_t seed, std::string_view name,
                                     std::uint64_t flat_index) noexcept;

/// out[i] = fp32(mean + std * standard_normal(seed, name, first_index + i)), the sum and product in
/// double.
/// Determinism   any split of a range into parts gives the same bits.
void fill_normal(std::span<float> out, std::uint64_t seed, std::string_view name,
                 std::uint64_t first_index, double mean, double std) noexcept;

namespace detail {
/// The number of loops that this CPU can run. All give the same results. The first one runs on any
/// CPU, and fill_normal uses the last one.
[[nodiscard]] std::size_t num_normal_loops() noexcept;
void fill_normal_with(std::size_t loop, std::span<float> out, std::uint64_t seed,
                      std::string_view name, std::uint64_t first_index, double mean,
                      double std) noexcept;
}  // namespace detail

}  // namespace isoshard
