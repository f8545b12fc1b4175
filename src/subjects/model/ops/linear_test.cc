// SPDX-License-Identifier: Apache-2.0
// Products of 16-bit matrices through fp32, against at::linear in fp64.
#include "subjects/model/ops/linear.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <array>
#include <optional>

namespace isoshard {
namespace {

constexpr std::array kTypes = {at::kBFloat16, at::kHalf};

// Small integers, whose sums of up to 256 products are exact in fp32 and, below 256, in 16 bits.
at::Tensor integers(at::IntArrayRef shape, std::int64_t most, std::uint64_t seed) {
  return at::randint(-most, most + 1, shape, at::detail::createCPUGenerator(seed),
                     at::TensorOptions(at::kDouble));
}

struct Products {
  at::Tensor y, of_x, of_weight, of_bias;
};

template <typename Linear>
Products products_of(const Linear& linear, at::ScalarType dtype, const at::Tensor& x,
                     const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& gradient) {
  // a copy for fp64, too
  const auto leaf = [&](const at::Tensor& t) {
    return t.to(dtype, false, true).requires_grad_(true);
  };
  const at::Tensor own_x = leaf(x), own_weight = leaf(weight), own_bias = leaf(bias);
  const at::Tensor y = linear(own_x, own_weight, own_bias);
  y.backward(gradient.to(dtype));
  return {y.detach(), own_x.grad(), own_weight.grad(), own_bias.grad()};
}

at::Tensor wide(const at::Tensor& x) {
  return x.to(at::kDouble);
}

TEST(ApplyLinear, ThroughFp32IsExactWhereSumsAre) {
  const at::Tensor x = integers({2, 3, 7}, 3, 1), weight = integers({5, 7}, 3, 2),
                   bias = integers({5}, 3, 3), gradient = integers({2, 3, 5}, 3, 4);
  const auto plain = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    return at::linear(a, b, c);
  };

  const Products right = products_of(plain, at::kDouble, x, weight, bias, gradient);

  for (const at::ScalarType dtype : kTypes) {
    const Products own = products_of(detail::widened_linear, dtype, x, weight, bias, gradient);
    EXPECT_EQ(own.y.scalar_type(), dtype);
    EXPECT_EQ(own.of_weight.scalar_type(), dtype);
    EXPECT_TRUE(at::equal(wide(own.y), right.y)) << toString(dtype);
    EXPECT_TRUE(at::equal(wide(own.of_x), right.of_x)) << toString(dtype);
    EXPECT_TRUE(at::equal(wide(own.of_weight), right.of_weight)) << toString(dtype);
    EXPECT_TRUE(at::equal(wide(own.of_bias), right.of_bias)) << toString(dtype);
  }
}

// A sum in bf16 stops at 256, as 256 + 1 rounds to 256; in fp16 at 2,048.
TEST(ApplyLinear, AddsUpInFp32AndRoundsOnce) {
  for (const at::ScalarType dtype : kTypes) {
    const std::int64_t terms = dtype == at::kHalf ? 4096 : 1000;  // both have 16-bit numbers
    const at::Tensor x = at::ones({1, terms}, dtype), weight = at::ones({1, terms}, dtype),
                     bias = at::full({1}, 24, dtype);

    const at::Tensor sum = detail::widened_linear(x, weight, std::nullopt),
                     with_bias = detail::widened_linear(x, weight, bias);

    EXPECT_EQ(sum.item<double>(), static_cast<double>(terms)) << toString(dtype);
    EXPECT_EQ(with_bias.item<double>(), static_cast<double>(terms + 24)) << toString(dtype);
  }
}

TEST(ApplyLinear, GivesNoGradientWhereNoneIsAskedFor) {
  const at::Tensor x = integers({4, 6}, 3, 5).to(at::kBFloat16).requires_grad_(true),
                   frozen = integers({5, 6}, 3, 6).to(at::kBFloat16);

  detail::widened_linear(x, frozen, std::nullopt).sum().backward();

  EXPECT_TRUE(x.grad().defined());
  EXPECT_FALSE(frozen.grad().defined());
}

TEST(ApplyLinear, IsAtLinearWhereLibTorchHasKernels) {
  const at::Tensor x = at::randn({3, 4, 8}, at::detail::createCPUGenerator(7)),
                   weight = at::randn({5, 8}, at::detail::createCPUGenerator(8));

  EXPECT_TRUE(detail::has_product_kernels(at::kFloat));
  EXPECT_TRUE(detail::has_product_kernels(at::kDouble));
  EXPECT_TRUE(at::equal(apply_linear(x, weight), at::linear(x, weight)));
}

}  // namespace
}  // namespace isoshard
