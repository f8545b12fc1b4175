// SPDX-License-Identifier: Apache-2.0
// A number is not rounded to 16 bits before 16-bit values are multiplied with it.
#include "core/tensor/scale.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

namespace isoshard {
namespace {

TEST(ScaleInPlace, MultipliesInFp32AndRoundsOnce) {
  const at::Tensor wide = at::randn({1000}, at::detail::createCPUGenerator(1));
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor values = wide.to(dtype), own = values.clone();

    scale_in_place(own, 1.0 / 3);

    EXPECT_TRUE(at::equal(own, (values.to(at::kFloat) * (1.0F / 3)).to(dtype))) << toString(dtype);
    EXPECT_FALSE(at::equal(own, values.clone().mul_(1.0 / 3)))
        << "at::Tensor::mul_ no longer rounds the number first: scale_in_place is not needed";
  }
}

TEST(ScaleInPlace, IsMulOfWiderValues) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor values = at::randn({100}, at::detail::createCPUGenerator(2)).to(dtype),
                     own = values.clone();

    scale_in_place(own, 0.999);

    EXPECT_TRUE(at::equal(own, values * 0.999)) << toString(dtype);
  }
}

}  // namespace
}  // namespace isoshard
