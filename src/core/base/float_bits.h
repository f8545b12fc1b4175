// SPDX-License-Identifier: Apache-2.0
/// bf16 and fp16 to and from fp32 by integer arithmetic: no ATen, no CPU extension, the same bits
/// everywhere.
///
/// To fp32 is exact. From fp32 rounds to nearest, ties to even, keeps subnormals, and overflows to
/// infinity. NaN becomes the quiet NaN 0x7fc0 (bf16, as c10::BFloat16) or sign | 0x7e00 (fp16, as
/// c10::Half).
#pragma once
#include <bit>
#include <cstdint>

namespace isoshard {

[[nodiscard]] constexpr float bf16_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

[[nodiscard]] constexpr std::uint16_t float_to_bf16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  // rounding up could turn a NaN into an infinity
  if ((bits & 0x7fffffffU) > 0x7f800000U) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

[[nodiscard]] constexpr float fp16_to_float(std::uint16_t bits) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fU;
  const std::uint32_t fraction = bits & 0x3ffU;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000U | (fraction << 13));
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 0x1p-24F;  // subnormal, or zero: exact
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

[[nodiscard]] constexpr std::uint16_t float_to_fp16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // from 65520 up
  // 2^-14: a normal fp16
  if (magnitude >= 0x38800000U) {
    const std::uint32_t rebiased = magnitude - (112U << 23);
    return static_cast<std::uint16_t>(sign | ((rebiased + 0xfffU + ((rebiased >> 13) & 1U)) >> 13));
  }
  // below 2^-25: half of the least subnormal
  if (magnitude < 0x33000000U) return static_cast<std::uint16_t>(sign);
  const std::uint32_t shift = 126U - (magnitude >> 23);  // 14..24
  const std::uint32_t mantissa = (magnitude & 0x7fffffU) | 0x800000U;
  const std::uint32_t rest = mantissa & ((1U << shift) - 1U);
  const std::uint32_t half = 1U << (shift - 1U);
  std::uint32_t quotient = mantissa >> shift;
  if (rest > half || (rest == half && (quotient & 1U) != 0)) ++quotient;
  return static_cast<std::uint16_t>(sign | quotient);
}

}  // namespace isoshard
