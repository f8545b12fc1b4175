// SPDX-License-Identifier: Apache-2.0
// Which op computes in what under autocast, and that the end of a scope restores everything.
#include "subjects/model/ops/autocast.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

namespace isoshard {
namespace {

TEST(Autocast, RoundsMatrixProductsAndNothingElse) {
  const at::Tensor a = at::rand({4, 4}), b = at::rand({4, 4}), bias = at::rand({4});
  const AutocastScope scope(at::kCPU, at::kBFloat16);

  EXPECT_EQ(at::linear(a, b, bias).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::addmm(bias, a, b).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::matmul(a.unsqueeze(0), b).scalar_type(), at::kBFloat16);
  const at::Tensor q = a.view({1, 1, 4, 4});
  EXPECT_EQ(at::scaled_dot_product_attention(q, q, q).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::embedding(a, at::zeros({2}, at::kLong)).scalar_type(), at::kFloat);
  EXPECT_EQ(at::softmax(a, -1).scalar_type(), at::kFloat);
  EXPECT_EQ(at::layer_norm(a, {4}, bias, bias).scalar_type(), at::kFloat);
  EXPECT_EQ(at::silu(a).scalar_type(), at::kFloat);
  EXPECT_EQ(at::tanh(a).scalar_type(), at::kFloat);
  EXPECT_EQ((at::matmul(a, b) + bias).scalar_type(), at::kFloat) << "mixed types give the wider";
  EXPECT_EQ(at::silu(at::matmul(a, b)).scalar_type(), at::kBFloat16) << "and others keep theirs";
  EXPECT_EQ(at::softmax(at::matmul(a, b), -1).scalar_type(), at::kBFloat16);
}

TEST(Autocast, EndsWithItsScopeAndForgetsCastWeights) {
  const at::Tensor x = at::ones({1, 4});
  at::Tensor weight = at::ones({4, 4}).requires_grad_(true);
  const auto under_autocast = [&] {
    const AutocastScope scope(at::kCPU, at::kBFloat16);
    return at::linear(x, weight);
  };

  const at::Tensor before = under_autocast();
  weight.detach().fill_(2);
  const at::Tensor after = under_autocast();

  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_EQ(at::linear(x, weight).scalar_type(), at::kFloat);
  EXPECT_EQ(before.sum().item<float>(), 16.0F);
  EXPECT_EQ(after.sum().item<float>(), 32.0F) << "a cast weight of the first scope was used again";
}

}  // namespace
}  // namespace isoshard
