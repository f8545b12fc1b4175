// SPDX-License-Identifier: Apache-2.0
/// Claims about tolerances.
#include "harness/compare/tolerance.h"

#include <gtest/gtest.h>

namespace isoshard {
namespace {

TEST(PerturbedTolerance, IsKTimesTheResponse) {
  const Response response{.relative_error = 1e-3, .scale_error = 1e-3, .absolute_norm = 2e-3, .max_abs = 1, .reference_norm = 2, .runs = 3};

  const PerturbedTolerance tolerance = perturbed_tolerance(response, 3, Dtype::kFloat32, 10'000, 2);

  EXPECT_DOUBLE_EQ(tolerance.relative_error, 3e-3);
  EXPECT_DOUBLE_EQ(tolerance.scale_error, 3e-3);
  EXPECT_DOUBLE_EQ(tolerance.absolute, 6e-3);
  EXPECT_FALSE(tolerance.insensitive);
}

TEST(PerturbedTolerance, HasFloorsOfTheCoarsestDtype) {
  const PerturbedTolerance many = perturbed_tolerance({}, 3, Dtype::kBFloat16, 1'000'000, 1);
  const PerturbedTolerance single = perturbed_tolerance({}, 3, Dtype::kBFloat16, 1, 1);

  EXPECT_NEAR(many.relative_error, 0x1p-8, 0x1p-8 * 0.01);
  EXPECT_DOUBLE_EQ(many.scale_error, 0x1p-8);
  EXPECT_DOUBLE_EQ(single.relative_error, 0x1p-6);
}

TEST(PerturbedTolerance, ScaleAllowsForTheErrorOfAnUnrelatedDifference) {
  const PerturbedTolerance tolerance = perturbed_tolerance({.relative_error = 1e-3}, 3, Dtype::kFloat64, 16, 1);

  EXPECT_DOUBLE_EQ(tolerance.scale_error, 4 * 3e-3 / 4);
}

TEST(PerturbedTolerance, ScaleAllowsForWhatAFewLargeElementsMake) {
  const Response even{.relative_error = 1e-3, .reference_max_abs = 0.05};
  const Response peaked{.relative_error = 1e-3, .reference_max_abs = 0.2};
  const Response single{.relative_error = 1e-3, .reference_max_abs = 1};

  EXPECT_DOUBLE_EQ(perturbed_tolerance(even, 3, Dtype::kFloat64, 1'000'000, 1).scale_error, 0.2 * 3e-3);
  EXPECT_DOUBLE_EQ(perturbed_tolerance(peaked, 3, Dtype::kFloat64, 1'000'000, 1).scale_error, 0.8 * 3e-3);
  EXPECT_DOUBLE_EQ(perturbed_tolerance(single, 3, Dtype::kFloat64, 1'000'000, 1).scale_error, 3e-3) << "no part is larger than the whole";
}

TEST(PerturbedTolerance, ScaleOfALargeTensorAllowsForCorrelatedErrors) {
  const PerturbedTolerance tolerance = perturbed_tolerance({.relative_error = 1e-3}, 3, Dtype::kFloat64, 1'000'000, 1);

  EXPECT_DOUBLE_EQ(tolerance.scale_error, 0.1 * 3e-3);
}

TEST(PerturbedTolerance, ScaleAllowsForTheErrorOfItsOwnSumsInFp64) {
  EXPECT_DOUBLE_EQ(perturbed_tolerance({}, 3, Dtype::kFloat64, 10'000, 1).scale_error, 108 * 0x1p-53);
  EXPECT_DOUBLE_EQ(perturbed_tolerance({}, 3, Dtype::kFloat64, 10'000, 1).relative_error, 32.03 * 0x1p-53);
  EXPECT_DOUBLE_EQ(perturbed_tolerance({}, 3, Dtype::kFloat32, 10'000, 1).scale_error, 0x1p-24);
}

TEST(PerturbedTolerance, ATensorBelowItsOwnResponseIsInsensitive) {
  const Response response{.absolute_norm = 1e-6};

  EXPECT_TRUE(perturbed_tolerance(response, 3, Dtype::kFloat32, 8, 0.9e-6).insensitive);
  EXPECT_FALSE(perturbed_tolerance(response, 3, Dtype::kFloat32, 8, 1.1e-6).insensitive);
}

}  // namespace
}  // namespace isoshard
