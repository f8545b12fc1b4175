// SPDX-License-Identifier: Apache-2.0
// A biased column/row pair against the unsharded pair, exact on integers.
// Legend: B batch, S sequence, H hidden (6), F ffn (12).
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

// Integers in [-3, 3]: every sum below is exact in fp32, in every order.
at::Tensor integers(at::IntArrayRef shape, std::int64_t seed) {
  std::int64_t numel = 1;
  for (const std::int64_t size : shape) numel *= size;
  return ((at::arange(numel) * 37 + seed * 11).remainder(7) - 3).to(at::kFloat).view(shape);
}

struct Pair {
  at::Tensor up_weight = integers({12, 6}, 1), up_bias = integers({12}, 2);
  at::Tensor down_weight = integers({6, 12}, 3), down_bias = integers({6}, 4);
  at::Tensor x_BSH = integers({2, 3, 6}, 5);
  at::Tensor cotangent_BSH = integers({2, 3, 6}, 6);
};

struct PairResult {
  at::Tensor y, x_grad, up_weight_grad, up_bias_grad, down_weight_grad, down_bias_grad;
};

// Computes the pair from this rank's leaves.
PairResult run_pair(const Strategy& strategy, const Pair& pair) {
  const auto leaf = [](const at::Tensor& value) {
    return value.detach().clone().requires_grad_(true);
  };
  const at::Tensor x = leaf(pair.x_BSH), up_weight = leaf(pair.up_weight),
                   up_bias = leaf(pair.up_bias);
  const at::Tensor down_weight = leaf(pair.down_weight), down_bias = leaf(pair.down_bias);
  const at::Tensor y =
      strategy.linear("m.down_proj", strategy.linear("m.up_proj", x, up_weight, up_bias, nullptr),
                      down_weight, down_bias, nullptr);
  (y * pair.cotangent_BSH).sum().backward();
  return {y.detach(),     x.grad(),           up_weight.grad(),
          up_bias.grad(), down_weight.grad(), down_bias.grad()};
}

ShardPlan pair_plan() {
  ShardPlan plan;
  plan.kinds = {{"m.up_proj.weight", ShardKind::kColumn},
                {"m.up_proj.bias", ShardKind::kColumn},
                {"m.down_proj.weight", ShardKind::kRow},
                {"m.down_proj.bias", ShardKind::kRow}};
  return plan;
}

at::Tensor own_part(const at::Tensor& whole, const Communicator& tp, std::int64_t dim) {
  const at::Tensor part =
      whole.chunk(tp.size(), dim)[static_cast<std::size_t>(tp.rank())].contiguous();
  EXPECT_EQ(part.numel() * tp.size(), whole.numel());
  return part;
}

Pair own_pair(const Pair& pair, const Communicator& tp) {
  Pair local = pair;
  local.up_weight = own_part(pair.up_weight, tp, 0);
  local.up_bias = own_part(pair.up_bias, tp, 0);
  local.down_weight = own_part(pair.down_weight, tp, 1);
  return local;
}

class ColumnRowPair : public ::testing::TestWithParam<int> {};

TEST_P(ColumnRowPair, ForwardAndGradientsAreBitEqualToTheUnshardedPair) {
  const Pair pair;
  const PairResult reference = run_pair(Strategy(), pair);
  ThreadWorld world(GetParam());

  world.run([&](Communicator& tp) {
    ASSERT_EQ(tp.size(), GetParam());
    const TensorParallelStrategy strategy(pair_plan(), tp, 1, 1.0);
    const PairResult actual = run_pair(strategy, own_pair(pair, tp));

    EXPECT_TRUE(at::equal(actual.y, reference.y));
    EXPECT_TRUE(at::equal(actual.x_grad, reference.x_grad));
    EXPECT_TRUE(at::equal(actual.up_weight_grad, own_part(reference.up_weight_grad, tp, 0)));
    EXPECT_TRUE(at::equal(actual.up_bias_grad, own_part(reference.up_bias_grad, tp, 0)));
    EXPECT_TRUE(at::equal(actual.down_weight_grad, own_part(reference.down_weight_grad, tp, 1)));
    EXPECT_TRUE(at::equal(actual.down_bias_grad, reference.down_bias_grad));
  });
}

TEST_P(ColumnRowPair, OneAllReduceEachWay) {
  const Pair pair;
  ThreadWorld world(GetParam());

  world.run([&](Communicator& tp) {
    const TensorParallelStrategy strategy(pair_plan(), tp, 1, 1.0);
    (void)run_pair(strategy, own_pair(pair, tp));
  });

  for (int rank = 0; rank < GetParam(); ++rank) {
    EXPECT_EQ(world.journal().num_calls(rank), 2U);
    EXPECT_EQ(
        world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kRowParallelForward),
        1U);
    EXPECT_EQ(
        world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kColumnParallelBackward),
        1U);
  }
}

// What the bias contract forbids: a negative control that the comparison above can fail.
class BiasOnEveryRank final : public Strategy {
 public:
  explicit BiasOnEveryRank(Communicator& tp) : tp_(&tp) {}
  [[nodiscard]] at::Tensor linear(std::string_view module, const at::Tensor& x,
                                  const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                                  Sink* /*sink*/) const override {
    if (module == "m.up_proj")
      return at::linear(column_parallel_input(x, *tp_, module), weight, bias);
    return row_parallel_sum(at::linear(x, weight, bias), *tp_, module);
  }

 private:
  Communicator* tp_;
};

TEST_P(ColumnRowPair, ABiasOnEveryRankCountsTpTimes) {
  const Pair pair;
  const PairResult reference = run_pair(Strategy(), pair);
  ThreadWorld world(GetParam());

  world.run([&](Communicator& tp) {
    const PairResult actual = run_pair(BiasOnEveryRank(tp), own_pair(pair, tp));

    EXPECT_FALSE(at::equal(actual.y, reference.y));
    EXPECT_TRUE(at::equal(actual.y - reference.y,
                          ((tp.size() - 1) * pair.down_bias).expand_as(reference.y)));
  });
}

TEST_P(ColumnRowPair, SplitsOutputOfColumnModulesOnly) {
  ThreadWorld world(GetParam());

  world.run([&](Communicator& tp) {
    const TensorParallelStrategy strategy(pair_plan(), tp, 1, 1.0);

    EXPECT_TRUE(strategy.splits_output("m.up_proj"));
    EXPECT_FALSE(strategy.splits_output("m.down_proj"));
    EXPECT_FALSE(strategy.splits_output("lm_head"));
    EXPECT_EQ(strategy.tp_degree(), GetParam());
  });
}

INSTANTIATE_TEST_SUITE_P(Tp, ColumnRowPair, ::testing::Values(2, 3),
                         [](const ::testing::TestParamInfo<int>& degree) {
                           return "tp" + std::to_string(degree.param);
                         });

}  // namespace
}  // namespace isoshard
