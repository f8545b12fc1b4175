// SPDX-License-Identifier: Apache-2.0
// Philox against its published vectors, normals against
// reference quantiles, and every split of a range.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/base/philox.h"
#include "core/random/normal.h"

namespace isoshard {
namespace {

// Random123 1.14, tests/kat_vectors, "philox4x32 10".
TEST(Philox, GivesThePublishedKnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U}));
  EXPECT_EQ(philox4x32({~0U, ~0U, ~0U, ~0U}, {~0U, ~0U}),
            (PhiloxCounter{0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU}));
  EXPECT_EQ(
      philox4x32({0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U}, {0xa4093822U, 0x299f31d0U}),
      (PhiloxCounter{0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U}));
}

TEST(Philox, HashesNamesAsFnv1a) {
  EXPECT_EQ(fnv1a_64(""), 0xcbf29ce484222325U);
  EXPECT_EQ(fnv1a_64("a"), 0xaf63dc4c8601ec8cU);
  EXPECT_EQ(fnv1a_64("foobar"), 0x85944171f73967e8U);
}

TEST(Philox, BitsDependOnSeedNameAndIndex) {
  std::set<std::uint64_t> seen;
  for (const std::uint64_t seed : {0ULL, 1ULL, 1ULL << 32, 1ULL << 63}) {
    for (const char* name : {"a.weight", "b.weight"}) {
      for (const std::uint64_t index : {0ULL, 1ULL, 2ULL, 1ULL << 32, 1ULL << 33, ~0ULL})
        seen.insert(random_bits(seed, name, index));
    }
  }

  EXPECT_EQ(seen.size(), 4U * 2U * 6U);
}

// Roots of erfc(x / sqrt 2) / 2 = m / 2^65 in 30 digits (mpmath), rounded to double.
const std::vector<std::pair<std::uint64_t, double>> kReferenceQuantiles{
    {0xffffffffffffffffU, -6.794229552421306e-20}, {0xfffffffffffffffeU, 6.794229552421306e-20},
    {0x8000000000000000U, 0.6744897501960817},     {0x7fffffffffffffffU, -0.6744897501960817},
    {0x123456789abcdef1U, -1.804767250888014},     {0xdeadbeefcafebabeU, 0.16386343674179274},
    {0x0f00000000000001U, -1.891229237820108},     {0x00000000ffffffffU, -6.337957754589672},
    {0x0000000000000003U, -9.035918848571939},     {0x0000000000000001U, -9.155293772686072},
    {0x0000000000000000U, 9.155293772686072},      {0x0000000000000002U, 9.035918848571939},
    {0xc000000000000000U, 0.31863936396437514},    {0x1999999999999999U, -1.6448536269514726}};

TEST(Normal, AgreesWithTheTrueQuantile) {
  for (const auto& [bits, quantile] : kReferenceQuantiles)
    EXPECT_NEAR(normal_of_bits(bits), quantile, 1e-7) << std::hex << bits;
}

// Independent of the hard-coded table of references: the distribution function of the result gives
// the probability back.
TEST(Normal, InvertsTheDistributionFunctionInEveryPartOfTheTable) {
  for (std::uint64_t i = 0; i < 64 * 64; ++i) {
    const std::uint64_t bits = (random_bits(3, "octaves", i) | (1ULL << 63)) >> (i % 64);
    const double p = static_cast<double>(bits | 1U) * 0x1p-65;
    const double z = std::abs(normal_of_bits(bits));

    const double density = std::exp(-z * z / 2) * 0.3989422804014327;

    ASSERT_NEAR((std::erfc(z * 0.7071067811865476) / 2 - p) / density, 0.0, 1e-7)
        << std::hex << bits;
  }
}

TEST(Normal, IsSymmetricAndMonotoneAcrossPartBoundaries) {
  for (int octave = 0; octave < 60; ++octave) {
    for (std::uint64_t part = 8; part < 16; ++part) {
      const std::uint64_t edge = (part << 60) >> octave;
      const std::uint64_t step = std::uint64_t{1} << (58 - std::min(octave, 56));

      EXPECT_GE(normal_of_bits((edge - step) & ~1ULL) + 2e-10, normal_of_bits(edge & ~1ULL));
      EXPECT_EQ(normal_of_bits(edge | 1U), -normal_of_bits(edge & ~1ULL));
    }
  }
}

TEST(Normal, ValuesAreTheSameOnEveryMachine) {
  std::vector<float> values(100003);
  fill_normal(values, 42, "model.layers.0.mlp.down_proj.weight", 0, 0.0, 0.02);

  std::uint64_t hash = fnv1a_64("");
  for (const float value : values)
    hash = (hash ^ std::bit_cast<std::uint32_t>(value)) * 0x100000001b3U;

  EXPECT_EQ(hash, 1298642054020916511U);  // also computed by an independent Python program
}

TEST(Normal, EverySplitGivesTheSameBits) {
  constexpr std::size_t kCount = 37;
  constexpr std::uint64_t kFirst = 11;
  std::vector<float> whole(kCount);
  fill_normal(whole, 5, "w", kFirst, 0.5, 2.0);
  for (std::size_t begin = 0; begin <= kCount; ++begin) {
    for (std::size_t end = begin; end <= kCount; ++end) {
      std::vector<float> part(end - begin);
      fill_normal(part, 5, "w", kFirst + begin, 0.5, 2.0);

      ASSERT_TRUE(
          std::equal(part.begin(), part.end(), whole.begin() + static_cast<std::ptrdiff_t>(begin)))
          << begin << ".." << end;
    }
  }
  for (std::size_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(whole[i], static_cast<float>(0.5 + 2.0 * standard_normal(5, "w", kFirst + i)));
  }
}

TEST(Normal, EveryLoopOfThisCpuGivesTheSameBits) {
  ASSERT_GE(detail::num_normal_loops(), 1U);
  for (std::size_t loop = 0; loop < detail::num_normal_loops(); ++loop) {
    for (const std::uint64_t first :
         {std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << 33) - 5}) {
      for (const std::size_t size : {0U, 1U, 2U, 127U, 128U, 129U, 130U, 1000U}) {
        std::vector<float> values(size, -1.0F);
        detail::fill_normal_with(loop, values, 9, "w", first, 0.5, 2.0);
        for (std::size_t i = 0; i < size; ++i) {
          ASSERT_EQ(values[i], static_cast<float>(0.5 + 2.0 * standard_normal(9, "w", first + i)))
              << "loop " << loop << ", first " << first << ", size " << size << ", at " << i;
        }
      }
    }
  }
}

TEST(Normal, MomentsAreThoseOfTheStandardNormal) {
  constexpr int kCount = 1 << 20;
  std::vector<float> values(kCount);
  fill_normal(values, 1, "moments", 0, 0.0, 1.0);

  double sum = 0, squares = 0, fourth = 0, neighbors = 0;
  for (int i = 0; i < kCount; ++i) {
    const double x = values[static_cast<std::size_t>(i)];
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    if (i > 0) neighbors += x * values[static_cast<std::size_t>(i) - 1];
  }

  // Five standard errors of each estimate.
  EXPECT_NEAR(sum / kCount, 0.0, 5.0 / 1024);
  EXPECT_NEAR(squares / kCount, 1.0, 5.0 * std::sqrt(2.0) / 1024);
  EXPECT_NEAR(fourth / kCount, 3.0, 5.0 * std::sqrt(96.0) / 1024);
  EXPECT_NEAR(neighbors / kCount, 0.0, 5.0 / 1024);
}

}  // namespace
}  // namespace isoshard
