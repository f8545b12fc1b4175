// SPDX-License-Identifier: Apache-2.0
// Projections see what a norm does not, stay within their bound, and are the same everywhere.
#include "harness/golden/projections.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/base/hex_float.h"
#include "core/base/philox.h"

namespace isoshard {
namespace {

Projections of(const std::vector<double>& elements, const std::string& name = "x", int rank = 0) {
  Projections sums{};
  add_projections(sums, name, rank, elements);
  return sums;
}

double norm_of(const std::vector<double>& elements) {
  return std::sqrt(std::inner_product(elements.begin(), elements.end(), elements.begin(), 0.0));
}

/// Whole numbers, so that every sum is exact.
std::vector<double> whole_numbers(std::size_t count, std::uint64_t seed) {
  std::vector<double> numbers(count);
  for (std::size_t i = 0; i < count; ++i)
    numbers[i] = static_cast<double>(random_bits(seed, "whole", i) % 2001) - 1000;
  return numbers;
}

TEST(GoldenProjections, AreTheSignedSumsThatTheHeaderDescribes) {
  const std::vector<double> elements = whole_numbers(37, 1);
  Projections want{};
  for (std::size_t i = 0; i < elements.size(); ++i) {
    const PhiloxCounter words =
        philox4x32({static_cast<std::uint32_t>(i / 16), 0, 3, 0},
                   {static_cast<std::uint32_t>(fnv1a_64("w (step 0)")),
                    static_cast<std::uint32_t>(fnv1a_64("w (step 0)") >> 32)});
    for (unsigned j = 0; j < kProjections; ++j) {
      const std::uint32_t sign = words.at(i % 16 / 4) >> (8 * (i % 4) + j) & 1U;
      want.at(j) += sign != 0 ? elements[i] : -elements[i];
    }
  }

  EXPECT_EQ(of(elements, "w (step 0)", 3), want);
}

// A golden of one machine is read on others: these sums must never change.
TEST(GoldenProjections, OfFixedNumbersAreTheseOnEveryMachine) {
  std::vector<double> elements(100);
  std::iota(elements.begin(), elements.end(), 0.5);

  const Projections sums = of(elements, "gradient of model.norm.weight (step 0)", 1);

  EXPECT_EQ(sums, (Projections{666, -60, -499, 49, -499, 147, 483, 537}));
}

TEST(GoldenProjections, OfOtherTensorsRanksAndPlacesHaveOtherSigns) {
  const std::vector<double> x = whole_numbers(4096, 5);
  const Projections here = of(x), there = of(x, "y"), elsewhere = of(x, "x", 1);

  for (std::size_t j = 0; j < kProjections; ++j) {
    // Beyond five standard deviations once in a million.
    for (const Projections& sums : {here, there, elsewhere})
      EXPECT_LT(std::fabs(sums[j]), 5 * norm_of(x));
    for (std::size_t i = 0; i < j; ++i) EXPECT_NE(here[i], here[j]);
  }
  EXPECT_NE(here, there);
  EXPECT_NE(here, elsewhere);
}

// What a norm cannot see moves projections by about as much as the tensors are apart.
TEST(GoldenProjections, SeePermutedNegatedSwappedAndWrongRows) {
  constexpr std::size_t kRow = 64;
  const std::vector<double> x = whole_numbers(64 * kRow, 1), other = whole_numbers(64 * kRow, 2);
  std::vector<std::pair<std::string, std::vector<double>>> wrong;
  const auto add = [&](const std::string& name, const auto& edit) {
    std::vector<double> changed = x;
    edit(changed);
    wrong.emplace_back(name, std::move(changed));
  };
  add("rolled by one element", [](auto& v) { std::rotate(v.begin(), v.begin() + 1, v.end()); });
  add("reversed", [](auto& v) { std::reverse(v.begin(), v.end()); });
  add("negated", [](auto& v) {
    for (double& e : v) e = -e;
  });
  add("two rows swapped",
      [](auto& v) { std::swap_ranges(v.begin(), v.begin() + kRow, v.begin() + 7 * kRow); });
  add("one row negated", [](auto& v) {
    std::for_each(v.begin() + 5 * kRow, v.begin() + 6 * kRow, [](double& e) { e = -e; });
  });
  add("one row of zeros", [](auto& v) { std::fill_n(v.begin() + 9 * kRow, kRow, 0.0); });
  add("another tensor", [&](auto& v) { v = other; });
  add("halves swapped",
      [](auto& v) { std::swap_ranges(v.begin(), v.begin() + 32 * kRow, v.begin() + 32 * kRow); });

  for (const auto& [name, changed] : wrong) {
    std::vector<double> error = x;
    for (std::size_t i = 0; i < x.size(); ++i) error[i] -= changed[i];
    const double distance = distance_of(of(x), of(changed));

    // Eight squares of mean ||error||^2: the chance of less than a tenth of 8 is 1e-4.
    EXPECT_GT(distance, norm_of(error) * std::sqrt(0.8)) << name;
    EXPECT_LT(distance, norm_of(error) * kProjectedFactor) << name;
  }
}

// The bound is derived for signs, not for normal numbers, and for any error: it must hold for
// errors in few elements, in all alike and of random size.
TEST(GoldenProjections, StayWithinTheBoundForErrorsOfAnyKindAndReachAThirdOfIt) {
  double largest = 0, sum_sq = 0;
  int count = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<double> error(1 + static_cast<std::size_t>(trial % 200));
    for (std::size_t i = 0; i < error.size(); ++i) {
      const double drawn =
          static_cast<double>(random_bits(static_cast<std::uint64_t>(trial), "e", i) % 1000) - 500;
      error[i] = trial % 3 == 0 ? 1 : trial % 3 == 1 ? drawn : std::pow(0.5, i);
    }
    if (norm_of(error) == 0) continue;
    const double ratio =
        distance_of(of(error, std::to_string(trial)), Projections{}) / norm_of(error);
    largest = std::max(largest, ratio);
    sum_sq += ratio * ratio;
    ++count;
  }

  EXPECT_LT(largest, kProjectedFactor);
  EXPECT_GT(largest, kProjectedFactor / 2) << "a bound that grew by mistake";
  EXPECT_NEAR(sum_sq / count, kProjections, 0.5) << "signs are not independent";
}

TEST(GoldenProjections, AreStoredWithinWhatTheirBoundGrowsBy) {
  const Projections exact = of(whole_numbers(500, 3));
  for (const double allowed : {1e-3, 0.7, 1.0, 300.0}) {
    const auto kept = stored(exact, allowed);

    ASSERT_TRUE(kept.has_value());
    EXPECT_GT(kept->allowed, allowed);
    EXPECT_LT(kept->allowed, 1.004 * allowed);
    EXPECT_LE(distance_of(exact, kept->values), kept->allowed - allowed);
    EXPECT_EQ(stored(kept->values, allowed)->values, kept->values);
  }
  EXPECT_FALSE(stored(exact, 0).has_value());
  EXPECT_FALSE(stored(exact, std::nan("")).has_value());
  EXPECT_FALSE(stored(exact, 1e-300).has_value());
  EXPECT_FALSE(stored({std::nan("")}, 1).has_value());
}

}  // namespace
}  // namespace isoshard
