// SPDX-License-Identifier: Apache-2.0
// Every element moves to a neighbor in its dtype, the same way in any box.
#include "core/tensor/moved_by_an_ulp.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

// 7 x 130 values of both signs, of 1/16 to 1.
at::Tensor values(at::ScalarType dtype) {
  const at::Tensor all = at::arange(910, at::kDouble).remainder(31).sub(15).add(0.25).div(16);
  return all.view({7, 130}).to(dtype);
}

TEST(MovedByAnUlp, EveryElementIsANeighborAboveOrBelow) {
  for (const at::ScalarType dtype : kDtypes) {
    const at::Tensor before = values(dtype), after = moved_by_an_ulp(before, 1);

    ASSERT_EQ(after.scalar_type(), dtype);
    const at::ScalarType bits = dtype == at::kDouble  ? at::kLong
                                : dtype == at::kFloat ? at::kInt
                                                      : at::kShort;
    // magnitudes are in the order of their bits
    const at::Tensor steps = (after.abs().view(bits) - before.abs().view(bits)).abs();
    EXPECT_TRUE(steps.eq(1).all().item<bool>()) << dtype;
    EXPECT_TRUE(after.sign().eq(before.sign()).all().item<bool>()) << dtype;
    const double share_up = after.gt(before).to(at::kDouble).mean().item<double>();
    EXPECT_GT(share_up, 0.4) << dtype;
    EXPECT_LT(share_up, 0.6) << dtype;
  }
}

TEST(MovedByAnUlp, SeedAndNameChooseTheDirections) {
  const at::Tensor before = values(at::kFloat), after = moved_by_an_ulp(before, 1, "w");

  EXPECT_TRUE(at::equal(moved_by_an_ulp(before, 1, "w"), after));
  EXPECT_FALSE(at::equal(moved_by_an_ulp(before, 2, "w"), after));
  EXPECT_FALSE(at::equal(moved_by_an_ulp(before, 1, "v"), after));
}

TEST(MovedByAnUlp, ABoxIsASliceOfTheWhole) {
  for (const at::ScalarType dtype : kDtypes) {
    const at::Tensor whole = values(dtype), moved = moved_by_an_ulp(whole, 2, "w");
    const auto box_of = [](const at::Tensor& x) { return x.slice(0, 2, 6).slice(1, 61, 130); };

    EXPECT_TRUE(
        at::equal(moved_box_by_an_ulp(box_of(whole), {7, 130}, {2, 61}, 2, "w"), box_of(moved)))
        << dtype;
  }
}

TEST(MovedByAnUlp, TheResultIsAContiguousCopyWithoutGradient) {
  const at::Tensor x = values(at::kFloat).t().requires_grad_();
  const at::Tensor before = x.detach().clone();

  const at::Tensor after = moved_by_an_ulp(x, 1);

  EXPECT_TRUE(at::equal(x.detach(), before));
  EXPECT_EQ(after.sizes(), x.sizes());
  EXPECT_TRUE(after.is_contiguous());
  EXPECT_FALSE(after.requires_grad());
}

TEST(MovedByAnUlp, ZerosAndLargestValuesStayFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const at::Tensor before =
      at::tensor({0.0F, -0.0F, kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(),
                  std::numeric_limits<float>::max()});
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    const at::Tensor after = moved_by_an_ulp(before, seed);

    EXPECT_EQ(std::abs(after[0].item<float>()), std::numeric_limits<float>::denorm_min());
    EXPECT_EQ(std::abs(after[1].item<float>()), std::numeric_limits<float>::denorm_min());
    EXPECT_TRUE(std::isinf(after[2].item<float>()) && std::isinf(after[3].item<float>()) &&
                std::isnan(after[4].item<float>()));
    EXPECT_TRUE(std::isfinite(after[5].item<float>()));
  }
}

TEST(MovedByAnUlp, IntegersAndBoxesOutsideOfTheirTensorAreRefused) {
  const at::Tensor x = values(at::kFloat);

  EXPECT_THROW((void)moved_by_an_ulp(at::ones({2}, at::kLong), 1), ShapeError);
  EXPECT_THROW((void)moved_box_by_an_ulp(x, {7, 130}, {0, 1}, 1, ""), ShapeError);
  EXPECT_THROW((void)moved_box_by_an_ulp(x, {910}, {0}, 1, ""), ShapeError);
}

}  // namespace
}  // namespace isoshard
