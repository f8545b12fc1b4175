// SPDX-License-Identifier: Apache-2.0
// The conversions against c10::BFloat16 and c10::Half: all
// 65536 values, and the roundings around each of them.
#include "core/base/float_bits.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/base/philox.h"

namespace isoshard {
namespace {

std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}
std::uint16_t c10_bf16(float value) {
  return c10::BFloat16(value).x;
}
std::uint16_t c10_fp16(float value) {
  return c10::Half(value).x;
}

/// Calls check for the fp32 numbers at, just below and just above `value` and the midpoint to its
/// upper neighbor in 16 bits.
template <class Check>
void around(float value, float next, Check&& check) {
  const float infinity = std::numeric_limits<float>::infinity();
  const float middle =
      static_cast<float>((static_cast<double>(value) + static_cast<double>(next)) / 2);
  for (const float x : {value, middle}) {
    check(x);
    check(std::nextafter(x, infinity));
    check(std::nextafter(x, -infinity));
  }
}

TEST(Bf16Bits, EveryValueWidensAsC10) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float expected = static_cast<float>(c10::BFloat16(bits, c10::BFloat16::from_bits()));
    ASSERT_EQ(bits_of(bf16_to_float(bits)), bits_of(expected)) << bits;
    if (!std::isnan(expected)) {
      ASSERT_EQ(float_to_bf16(bf16_to_float(bits)), bits);
    }
  }
}

TEST(Bf16Bits, EveryRoundingIsThatOfC10) {
  for (std::uint32_t i = 0; i < 65535; ++i) {
    around(bf16_to_float(static_cast<std::uint16_t>(i)),
           bf16_to_float(static_cast<std::uint16_t>(i + 1)),
           [](float x) { ASSERT_EQ(float_to_bf16(x), c10_bf16(x)) << bits_of(x); });
  }
  EXPECT_EQ(float_to_bf16(1.0F + 0x1p-8F), 0x3f80);            // tie to even: down
  EXPECT_EQ(float_to_bf16(1.0F + 0x1p-7F + 0x1p-8F), 0x3f82);  // tie to even: up
  EXPECT_EQ(float_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
}

TEST(Bf16Bits, NanStaysNan) {
  for (const std::uint32_t bits :
       {0x7f800001U, 0x7fffffffU, 0xffffffffU, 0xff800001U, 0x7fc00000U}) {
    EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(std::bit_cast<float>(bits))))) << bits;
  }
}

TEST(Fp16Bits, EveryValueWidensAsC10) {
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const float expected = static_cast<float>(c10::Half(bits, c10::Half::from_bits()));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(fp16_to_float(bits))) << bits;
      ASSERT_TRUE(std::isnan(fp16_to_float(float_to_fp16(fp16_to_float(bits))))) << bits;
    } else {
      ASSERT_EQ(bits_of(fp16_to_float(bits)), bits_of(expected)) << bits;
      ASSERT_EQ(float_to_fp16(fp16_to_float(bits)), bits);
    }
  }
}

TEST(Fp16Bits, EveryRoundingIsThatOfC10) {
  for (std::uint32_t i = 0; i < 65535; ++i) {
    around(fp16_to_float(static_cast<std::uint16_t>(i)),
           fp16_to_float(static_cast<std::uint16_t>(i + 1)), [](float x) {
             if (std::isnan(x)) return;
             ASSERT_EQ(float_to_fp16(x), c10_fp16(x)) << bits_of(x);
           });
  }
  EXPECT_EQ(float_to_fp16(65519.996F), 0x7bff);
  EXPECT_EQ(float_to_fp16(65520.0F), 0x7c00);
  EXPECT_EQ(float_to_fp16(0x1p-25F), 0x0000);  // tie to even: to zero
  EXPECT_EQ(float_to_fp16(std::nextafter(0x1p-25F, 1.0F)), 0x0001);
  EXPECT_EQ(float_to_fp16(-0x1p-26F), 0x8000);
}

TEST(Fp16Bits, RandomFloatsRoundAsC10) {
  for (std::uint64_t i = 0; i < 2000000; ++i) {
    const auto x =
        std::bit_cast<float>(static_cast<std::uint32_t>(random_bits(1, "float_bits", i)));
    if (std::isnan(x)) continue;
    ASSERT_EQ(float_to_fp16(x), c10_fp16(x)) << bits_of(x);
    ASSERT_EQ(float_to_bf16(x), c10_bf16(x)) << bits_of(x);
  }
}

}  // namespace
}  // namespace isoshard
