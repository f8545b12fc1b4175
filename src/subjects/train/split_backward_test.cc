// SPDX-License-Identifier: Apache-2.0
// Both halves together are one backward pass, bit by bit.
#include "subjects/train/split_backward.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

// Two layers with a norm, a bias, a residual and a table that reads no input.
struct Net {
  explicit Net(at::ScalarType type) {
    at::manual_seed(7);
    const auto drawn = [&](at::IntArrayRef shape) {
      leaves.push_back(at::randn(shape, at::kDouble).to(type).requires_grad_(true));
      return leaves.back();
    };
    input = at::randn({3, 8}, at::kDouble).to(type).requires_grad_(true);
    norm = drawn({8}), up = drawn({16, 8}), bias = drawn({16}), down = drawn({8, 16});
    table = drawn({3, 8});
    gradient = at::randn({3, 8}, at::kDouble).to(type);
  }
  at::Tensor forward() const {
    const at::Tensor x = at::layer_norm(input + table.sin(), {8}, norm);
    return at::linear(at::silu(at::linear(x, up, bias)), down) + input;
  }
  // of the leaves, then of the input
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& leaf : leaves) all.push_back(leaf.grad());
    all.push_back(input.grad());
    return all;
  }
  std::vector<at::Tensor> leaves;
  at::Tensor input, norm, up, bias, down, table, gradient;
};

class SplitBackwardOf : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(SplitBackwardOf, ANetGivesTheBitsOfOnePass) {
  const Net whole(GetParam()), split(GetParam());
  whole.forward().backward(whole.gradient);

  SplitBackward halves;
  const at::Tensor of_input = halves.input_gradient(split.forward(), split.gradient, split.input);
  EXPECT_FALSE(split.up.grad().defined()) << "the first half is of the input alone";
  EXPECT_FALSE(split.table.grad().defined());
  halves.weight_gradients();

  EXPECT_TRUE(of_input.equal(whole.input.grad()));
  EXPECT_FALSE(split.input.grad().defined());
  for (std::size_t i = 0; i < whole.leaves.size(); ++i)
    EXPECT_TRUE(split.leaves[i].grad().equal(whole.leaves[i].grad())) << i;
}
INSTANTIATE_TEST_SUITE_P(Dtypes, SplitBackwardOf, ::testing::Values(at::kFloat, at::kBFloat16));

// Second halves may come in any order, and their gradients add up in that order.
TEST(SplitBackward, HalvesOfTwoPassesMayBeMixed) {
  const Net whole(at::kFloat), split(at::kFloat);
  for (int pass = 0; pass < 2; ++pass) whole.forward().backward(whole.gradient * (pass + 1));

  SplitBackward first, second;
  (void)first.input_gradient(split.forward(), split.gradient, split.input);
  (void)second.input_gradient(split.forward(), split.gradient * 2, split.input);
  first.weight_gradients();
  second.weight_gradients();

  for (std::size_t i = 0; i < whole.leaves.size(); ++i)
    EXPECT_TRUE(split.leaves[i].grad().equal(whole.leaves[i].grad())) << i;
}

TEST(SplitBackward, CallsEachHookOnceAndKeepsWhatItMakes) {
  const auto backward = [](bool is_split, std::vector<std::string>& calls) {
    Net net(at::kFloat);
    const at::Tensor hidden = at::linear(net.input, net.up, net.bias);
    hidden.register_hook([&](const at::Tensor& gradient) {
      calls.emplace_back("hidden");
      return gradient * 3;
    });
    const at::Tensor row = net.table.exp();
    row.register_hook([&](const at::Tensor& gradient) {
      calls.emplace_back("table");
      return gradient;
    });
    const at::Tensor result = at::linear(hidden, net.down) + row;
    if (is_split) {
      SplitBackward halves;
      (void)halves.input_gradient(result, net.gradient, net.input);
      EXPECT_THAT(calls, ::testing::ElementsAre("hidden"));
      halves.weight_gradients();
    } else {
      result.backward(net.gradient);
    }
    return net.up.grad();
  };
  std::vector<std::string> of_whole, of_halves;

  EXPECT_TRUE(backward(true, of_halves).equal(backward(false, of_whole)));

  EXPECT_THAT(of_halves, ::testing::ElementsAre("hidden", "table"));
  EXPECT_THAT(of_whole, ::testing::UnorderedElementsAre("hidden", "table"));
}

TEST(SplitBackward, RefusesALeafThatIsReadTwice) {
  const Net net(at::kFloat);
  const at::Tensor result = at::layer_norm(net.forward(), {8}, net.norm);
  SplitBackward halves;

  EXPECT_THROW((void)halves.input_gradient(result, net.gradient, net.input), NotBuiltError);
}

class Doubled final : public torch::autograd::Function<Doubled> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x,
                            const at::Tensor& weight) {
    return x * 2 + weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] * 2, gradients[0]};
  }
};

TEST(SplitBackward, RefusesFunctionsThatWouldRunTwice) {
  const Net net(at::kFloat);
  const at::Tensor result = Doubled::apply(net.input, net.table);
  SplitBackward halves;

  EXPECT_THROW((void)halves.input_gradient(result, net.gradient, net.input), NotBuiltError);
}

}  // namespace
}  // namespace isoshard
