// SPDX-License-Identifier: Apache-2.0
// Statistics of differences by hand-counted examples.
#include "suite/published/differences.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "core/base/error.h"

namespace isoshard {
namespace {

TEST(Differences, AreThoseCountedByHand) {
  const at::Tensor reference = at::tensor({1.0, 2.0, 3.0, -4.0, 0.0}, at::kDouble);
  const at::Tensor actual = reference + at::tensor({0.0, 0.0005, -0.002, 0.02, 0.0}, at::kDouble);

  const Differences d = differences(reference, actual);

  EXPECT_EQ(d.numel, 5);
  EXPECT_NEAR(d.max, 0.02, 1e-12);
  EXPECT_NEAR(d.mean, 0.0225 / 5, 1e-12);
  EXPECT_NEAR(d.median, 0.0005, 1e-9);
  EXPECT_EQ(d.percent_above(1e-4), 60);
  EXPECT_EQ(d.percent_above(1e-3), 40);
  EXPECT_EQ(d.percent_above(5e-3), 20);
  EXPECT_EQ(d.percent_above(1e-2), 20);
  EXPECT_NEAR(d.worst_excess, 0.02 - 0.004, 1e-12);
  EXPECT_NEAR(d.reference_mean, 0.4, 1e-12);
  EXPECT_EQ(d.reference_max, 4);
  EXPECT_EQ(d.not_finite, 0);
  EXPECT_THROW((void)d.percent_above(0.3), UsageError);
}

TEST(Differences, CountWhatIsNotFiniteOnEitherSide) {
  const at::Tensor reference = at::tensor({1.0F, std::numeric_limits<float>::infinity(), 2.0F});
  const at::Tensor actual = at::tensor(
      {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 2.0F});

  EXPECT_EQ(differences(reference, actual).not_finite, 2);
  EXPECT_EQ(differences_of(to_json(differences(reference, actual))).not_finite, 2);
}

TEST(Differences, OfOtherShapesOrOfNothingAreErrors) {
  EXPECT_THROW((void)differences(at::ones({2}), at::ones({3})), ShapeError);
  EXPECT_THROW((void)differences(at::ones({0}), at::ones({0})), VacuousError);
}

}  // namespace
}  // namespace isoshard
