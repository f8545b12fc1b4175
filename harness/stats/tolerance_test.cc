// SPDX-License-Identifier: Apache-2.0
/// Claims about tolerances.
#include "harness/stats/tolerance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

namespace isoshard {
namespace {

TEST(PerturbedTolerance, IsKTimesTheResponse) {
  const Response response{.relative_error = 1e-1,
                          .scale_error = 1e-1,
                          .absolute_norm = 2e-1,
                          .max_abs = 1,
                          .reference_norm = 2,
                          .runs = 3};

  const PerturbedTolerance tolerance =
      perturbed_tolerance(response, 3, Dtype::kBFloat16, 10'000, 2);

  EXPECT_DOUBLE_EQ(tolerance.relative_error, 3e-1);
  EXPECT_DOUBLE_EQ(tolerance.scale_error, 3e-1);
  EXPECT_DOUBLE_EQ(tolerance.absolute, 6e-1);
  EXPECT_FALSE(tolerance.insensitive);
}

TEST(PerturbedTolerance, AllowsForOtherKernelsWhereSumsRoundInTheDtypeItself) {
  EXPECT_DOUBLE_EQ(responses_allowed(3, Dtype::kBFloat16), 3);
  EXPECT_DOUBLE_EQ(responses_allowed(3, Dtype::kFloat16), 3);
  EXPECT_DOUBLE_EQ(responses_allowed(2, Dtype::kFloat32), 2 * std::sqrt(4.5));
  EXPECT_DOUBLE_EQ(responses_allowed(2, Dtype::kFloat64), 2 * std::sqrt(4.5));
}

TEST(PerturbedTolerance, HasFloorsOfTheCoarsestDtype) {
  const PerturbedTolerance many = perturbed_tolerance({}, 3, Dtype::kBFloat16, 1'000'000, 1);
  const PerturbedTolerance single = perturbed_tolerance({}, 3, Dtype::kBFloat16, 1, 1);

  EXPECT_NEAR(many.relative_error, 0x1p-7, 0x1p-7 * 0.01);
  EXPECT_DOUBLE_EQ(many.scale_error, 0x1p-7);
  EXPECT_DOUBLE_EQ(single.relative_error, 0x1p-6);
}

TEST(PerturbedTolerance, TheFloorHoldsTheWorstOfTwoRoundings) {
  // Each of two runs rounds a value by at most u, in fp32 and fp64 twice; values just above a power
  // of two come nearest to it.
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    const double u = unit_roundoff(dtype), apart = (size_of(dtype) == 2 ? 2 : 4) * u / (1 + u);
    EXPECT_LE(apart, rounding_floor(dtype, 1'000'000'000)) << name_of(dtype);
    EXPECT_GE(1.02 * apart, rounding_floor(dtype, 1'000'000'000)) << name_of(dtype);
  }
}

TEST(LeastNormal, HasAllDigits) {
  EXPECT_EQ(least_normal(Dtype::kFloat32), std::numeric_limits<float>::min());
  EXPECT_EQ(least_normal(Dtype::kFloat64), std::numeric_limits<double>::min());
  EXPECT_EQ(least_normal(Dtype::kFloat16), 0x1p-14);
}

TEST(PerturbedTolerance, SubnormalNumbersAreHalfTheirDistanceOff) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    const double least = least_positive(dtype), norm = 10 * least;
    EXPECT_DOUBLE_EQ(perturbed_tolerance({}, 3, dtype, 4, norm).relative_error, 0.3)
        << name_of(dtype) << ": k least / 2 in each of 4 elements, of a norm of 10 least";
    EXPECT_EQ(perturbed_tolerance({}, 3, dtype, 4, norm).subnormal, dtype != Dtype::kFloat16);
    if (dtype == Dtype::kFloat16) continue;
    EXPECT_FALSE(perturbed_tolerance({}, 3, dtype, 4, 1e-30).subnormal);
    EXPECT_FALSE(perturbed_tolerance({}, 3, dtype, 4, 0).subnormal);
    EXPECT_EQ(perturbed_tolerance({}, 3, dtype, 4, 1).relative_error, rounding_floor(dtype, 4))
        << name_of(dtype) << ": too small to count beside ordinary numbers";
  }
}

TEST(PerturbedTolerance, ScaleAllowsForTheErrorOfAnUnrelatedDifference) {
  const PerturbedTolerance tolerance =
      perturbed_tolerance({.relative_error = 1e-1}, 3, Dtype::kBFloat16, 64, 1);

  EXPECT_DOUBLE_EQ(tolerance.scale_error, 0.5 * 3e-1);
}

TEST(PerturbedTolerance, ScaleAllowsForWhatAFewLargeElementsMake) {
  const Response even{.relative_error = 1e-1, .reference_max_abs = 0.05};
  const Response peaked{.relative_error = 1e-1, .reference_max_abs = 0.2};
  const Response single{.relative_error = 1e-1, .reference_max_abs = 1};

  EXPECT_DOUBLE_EQ(perturbed_tolerance(even, 3, Dtype::kBFloat16, 1'000'000, 1).scale_error,
                   0.2 * 3e-1);
  EXPECT_DOUBLE_EQ(perturbed_tolerance(peaked, 3, Dtype::kBFloat16, 1'000'000, 1).scale_error,
                   0.8 * 3e-1);
  EXPECT_DOUBLE_EQ(perturbed_tolerance(single, 3, Dtype::kBFloat16, 1'000'000, 1).scale_error, 3e-1)
      << "no part is larger than the whole";
}

TEST(PerturbedTolerance, ScaleOfALargeTensorAllowsForCorrelatedErrors) {
  const PerturbedTolerance tolerance =
      perturbed_tolerance({.relative_error = 1e-1}, 3, Dtype::kBFloat16, 1'000'000, 1);

  EXPECT_DOUBLE_EQ(tolerance.scale_error, 0.1 * 3e-1);
}

TEST(PerturbedTolerance, ScaleAllowsForTheErrorOfItsOwnSumsInFp64) {
  EXPECT_DOUBLE_EQ(perturbed_tolerance({}, 3, Dtype::kFloat64, 10'000, 1).scale_error,
                   108 * 0x1p-53);
  EXPECT_DOUBLE_EQ(perturbed_tolerance({}, 3, Dtype::kFloat64, 10'000, 1).relative_error,
                   4.06 * 0x1p-53);
  EXPECT_DOUBLE_EQ(perturbed_tolerance({}, 3, Dtype::kFloat32, 10'000, 1).scale_error, 0x1p-22);
}

TEST(PerturbedTolerance, ATensorThatIsRoundingNoiseIsInsensitive) {
  const Response response{.absolute_norm = 1e-6};

  EXPECT_TRUE(perturbed_tolerance(response, 3, Dtype::kFloat32, 8, 0.9e-6).insensitive);
  EXPECT_TRUE(perturbed_tolerance(response, 3, Dtype::kFloat32, 8, 1.9e-6).insensitive);
  EXPECT_FALSE(perturbed_tolerance(response, 3, Dtype::kFloat32, 8, 2.1e-6).insensitive);
}

// Of 200,000 tensors of n elements the error is above t times the largest of three draws in about
// as many as the bound for that t says, and never in more.
TEST(FewElements, TheBoundHoldsWhatDrawsExceed) {
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  const auto norm_of = [&](int n) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += std::pow(normal(random), 2);
    return std::sqrt(sum);
  };
  constexpr int kTensors = 200'000;
  for (const int n : {1, 2, 4, 8}) {
    // The factor for a chance of 1e-6 gives that for any other: t^(-3n).
    const double t = 3 * few_elements_factor(n) * std::pow(1e-6 / 1e-3, 1.0 / (3 * n));
    int above = 0;
    for (int i = 0; i < kTensors; ++i) {
      const double largest = std::max({norm_of(n), norm_of(n), norm_of(n)});
      above += norm_of(n) > t * largest ? 1 : 0;
    }
    EXPECT_LT(above, kTensors * 1.3e-3) << n;
    EXPECT_GT(above, kTensors * (n >= 4 ? 1e-5 : 3e-4)) << n << ": the bound is far too wide";
  }
}

TEST(FewElements, AreOfNoConcernFromFifteenOn) {
  EXPECT_NEAR(3 * few_elements_factor(2), 13.5, 0.05);
  EXPECT_GT(few_elements_factor(14), 1);
  EXPECT_EQ(few_elements_factor(15), 1);
  EXPECT_EQ(few_elements_factor(std::int64_t{1} << 40), 1);
  EXPECT_EQ(few_elements_factor(0), few_elements_factor(1));
}

}  // namespace
}  // namespace isoshard
