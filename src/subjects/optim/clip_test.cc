// SPDX-License-Identifier: Apache-2.0
// Clipping by the global norm.
#include "subjects/optim/clip.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace isoshard {
namespace {

TEST(GradientClip, SumOfSquaresIsOverAllGradientsInFp64) {
  const NamedTensors gradients{{"a", at::full({3}, 3.0, at::kFloat)},
                               {"b", at::Tensor()},
                               {"c", at::full({2, 2}, 1e-5, at::kDouble)},
                               {"d", at::full({1}, 1e30, at::kFloat)}};

  const double sum = sum_of_squares(gradients);

  const double large = static_cast<double>(1e30F);  // its square is beyond fp32
  EXPECT_DOUBLE_EQ(sum, 27.0 + 4e-10 + large * large);
  EXPECT_EQ(sum_of_squares({}), 0.0);
}

TEST(GradientClip, FactorIsTorchsAndAtMostOne) {
  EXPECT_EQ(clip_factor(4.0, 1.0), 1.0 / (4.0 + 1e-6));
  EXPECT_EQ(clip_factor(0.5, 1.0), 1.0);
  EXPECT_EQ(clip_factor(1.0, 1.0), 1.0 / (1.0 + 1e-6));
  EXPECT_EQ(clip_factor(0.0, 1.0), 1.0);
}

TEST(GradientClip, FactorIsOneWhenClippingIsOff) {
  EXPECT_EQ(clip_factor(1e9, 0.0), 1.0);
}

TEST(GradientClip, ANanNormIsNotHidden) {
  EXPECT_TRUE(std::isnan(clip_factor(std::nan(""), 1.0)));
  EXPECT_EQ(clip_factor(std::numeric_limits<double>::infinity(), 1.0), 0.0);
}

TEST(GradientClip, ScalesEveryGradientInPlace) {
  NamedTensors gradients{{"a", at::full({2}, 4.0, at::kFloat)},
                         {"b", at::Tensor()},
                         {"c", at::full({1}, 8.0, at::kBFloat16)}};
  const at::Tensor a = gradients["a"];

  scale_gradients(gradients, 0.25);

  EXPECT_TRUE(at::equal(a, at::full({2}, 1.0, at::kFloat)));
  EXPECT_TRUE(at::equal(gradients["c"], at::full({1}, 2.0, at::kBFloat16)));
}

TEST(GradientClip, AFactorOfOneTouchesNothing) {
  NamedTensors gradients{{"a", at::full({2}, 4.0, at::kFloat)}};
  const auto version = gradients["a"].unsafeGetTensorImpl()->version_counter().current_version();

  scale_gradients(gradients, 1.0);

  EXPECT_EQ(gradients["a"].unsafeGetTensorImpl()->version_counter().current_version(), version);
}

}  // namespace
}  // namespace isoshard
