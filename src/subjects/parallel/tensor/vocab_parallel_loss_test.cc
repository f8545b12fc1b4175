// SPDX-License-Identifier: Apache-2.0
// The loss of split logits is that of the whole ones, padding
// or not, smoothed or not; so are embedding and head.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>

#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"
#include "subjects/model/ops/linear_loss.h"
#include "subjects/model/ops/loss.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"

namespace isoshard {
namespace {

constexpr std::int64_t kVocab = 10, kHidden = 5;

ShardPlan plan_of(int tp) {
  ShardPlan plan;
  plan.kinds = {{"embed.weight", ShardKind::kVocabEmbedding},
                {"lm_head.weight", ShardKind::kVocabHead}};
  plan.vocab_size = kVocab;
  plan.vocab_rows_per_rank = (kVocab + tp - 1) / tp;
  return plan;
}

LossOptions options_of(Communicator& tp, double smoothing) {
  LossOptions options;
  options.label_smoothing = smoothing;
  options.tp = &tp;
  options.shard = plan_of(tp.size()).vocab_shard(tp.rank());
  return options;
}

struct Batch {
  at::Tensor logits_BSV =
      at::sin(at::arange(2 * 3 * kVocab, at::kDouble) * 1.7).view({2, 3, kVocab}) * 4;
  at::Tensor targets_BS =
      at::tensor(at::ArrayRef<std::int64_t>({0, 9, -100, 5, 3, 7})).view({2, 3});
  at::Tensor weight_B = at::tensor({0.25, 0.5}, at::kDouble);
};

/// This rank's columns, and `filler` in the padding.
at::Tensor own_columns(const at::Tensor& whole, const VocabShard& shard, double filler) {
  at::Tensor own = at::full({2, 3, shard.rows}, filler, whole.options());
  own.narrow(2, 0, shard.count).copy_(whole.narrow(2, shard.begin, shard.count));
  return own;
}

struct Result {
  at::Tensor loss, sample_sum_B, gradient;
};

Result run(const at::Tensor& logits_BSV, const Batch& batch, const LossOptions& options) {
  const at::Tensor logits = logits_BSV.clone().requires_grad_(true);
  const CrossEntropy result = cross_entropy(logits, batch.targets_BS, batch.weight_B, options);
  result.loss.backward();
  return {result.loss.detach(), result.sample_sum_B, logits.grad().clone()};
}

using DegreeAndSmoothing = std::tuple<int, double>;
class VocabParallelCrossEntropy : public ::testing::TestWithParam<DegreeAndSmoothing> {};

TEST_P(VocabParallelCrossEntropy, IsThatOfTheWholeLogits) {
  const auto [degree, smoothing] = GetParam();
  const Batch batch;
  LossOptions whole_options;
  whole_options.label_smoothing = smoothing;
  const Result whole = run(batch.logits_BSV, batch, whole_options);
  ThreadWorld world(degree);

  world.run([&, tp_degree = degree, e = smoothing](Communicator& tp) {
    ASSERT_EQ(tp.size(), tp_degree);
    const LossOptions options = options_of(tp, e);
    const VocabShard& shard = options.shard;
    ASSERT_TRUE(tp_degree == 1 || shard.rows < kVocab);
    const Result actual = run(own_columns(batch.logits_BSV, shard, 1e3), batch, options);

    EXPECT_TRUE(at::allclose(actual.loss, whole.loss, 1e-13, 0));
    EXPECT_TRUE(at::allclose(actual.sample_sum_B, whole.sample_sum_B, 1e-13, 0));
    EXPECT_TRUE(at::allclose(actual.gradient.narrow(2, 0, shard.count),
                             whole.gradient.narrow(2, shard.begin, shard.count), 1e-12, 1e-15));
    EXPECT_EQ(actual.gradient.narrow(2, shard.count, shard.rows - shard.count)
                  .count_nonzero()
                  .item<std::int64_t>(),
              0);
  });
  for (int rank = 0; rank < degree; ++rank) {
    const std::uint64_t smoothed = smoothing == 0 ? 0 : 1;
    EXPECT_EQ(world.journal().num_calls(rank), 3 + smoothed);
    EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kVocabParallelMax),
              1U);
    EXPECT_EQ(
        world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kVocabParallelLogsumexp),
        1U);
    EXPECT_EQ(
        world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kVocabParallelTarget),
        1U);
    EXPECT_EQ(
        world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kVocabParallelSmoothing),
        smoothed);
  }
}

// Neither the content of the padding nor the cut into blocks changes a bit, in any dtype.
TEST_P(VocabParallelCrossEntropy, PaddingAndBlocksChangeNoBit) {
  const auto [degree, smoothing] = GetParam();
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const Batch batch;
    const at::Tensor logits = batch.logits_BSV.to(dtype);
    ThreadWorld world(degree);

    world.run([&, e = smoothing](Communicator& tp) {
      LossOptions options = options_of(tp, e);
      const Result expected = run(own_columns(logits, options.shard, 0), batch, options);
      for (const std::int64_t block : {1, 4, 7}) {
        options.block_rows = block;
        for (const double filler : {6e4, std::nan("")}) {
          const Result actual = run(own_columns(logits, options.shard, filler), batch, options);
          EXPECT_TRUE(at::equal(actual.loss, expected.loss) &&
                      at::equal(actual.sample_sum_B, expected.sample_sum_B))
              << block;
          EXPECT_TRUE(at::equal(actual.gradient, expected.gradient)) << block << " " << filler;
        }
      }
    });
  }
}

// 4 ranks: shards of 3 and one true column on the last; 6 ranks: the last has none.
INSTANTIATE_TEST_SUITE_P(Degrees, VocabParallelCrossEntropy,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 6),
                                            ::testing::Values(0.0, 0.1)),
                         [](const ::testing::TestParamInfo<DegreeAndSmoothing>& degree) {
                           return "tp" + std::to_string(std::get<0>(degree.param)) +
                                  (std::get<1>(degree.param) > 0 ? "_smoothed" : "");
                         });

// docs/internals/tolerances.md: a token's loss is within (2 max|z| + V + tp + 4) u. A column that
// is lost leaves that bound.
TEST(VocabParallelLoss, InFp32IsWithinItsAnalyticBound) {
  const Batch batch;
  const at::Tensor logits = batch.logits_BSV.to(at::kFloat);
  const Result exact = run(logits.to(at::kDouble), batch, {});
  const at::Tensor without_column = logits.clone();
  without_column.select(2, 1).fill_(-1e30);  // nobody's target
  for (const int degree : {1, 2, 3, 4, 6}) {
    const double largest_z = 8, tokens = 3,
                 bound = (2 * largest_z + kVocab + degree + 4) * 0x1p-24 * tokens;
    ThreadWorld world(degree);

    world.run([&](Communicator& tp) {
      const LossOptions options = options_of(tp, 0);
      const auto error_of = [&](const at::Tensor& whole) {
        const Result actual = run(own_columns(whole, options.shard, 0), batch, options);
        return (actual.sample_sum_B - exact.sample_sum_B).abs().max().item<double>();
      };

      EXPECT_LE(error_of(logits), bound);
      EXPECT_GT(error_of(tp.rank() == 0 ? without_column : logits), 100 * bound);
    });
  }
}

TEST(VocabParallelLoss, RefusesTargetsOutsideTheVocabularyAndOtherShapes) {
  ThreadWorld world(1);
  world.run([&](Communicator& tp) {
    const Batch batch;
    const LossOptions options = options_of(tp, 0);
    const auto loss = [&](const at::Tensor& logits, const at::Tensor& targets) {
      (void)cross_entropy(logits, targets, batch.weight_B, options);
    };

    EXPECT_THROW(loss(batch.logits_BSV, batch.targets_BS + kVocab), ShapeError);
    EXPECT_THROW(loss(batch.logits_BSV.narrow(2, 0, 9), batch.targets_BS), ShapeError);
  });
}

// Integers: every sum is exact. What pads a shard is not read and gets no gradient.
TEST(VocabParallelLoss, OfALatticeModelIsExactlyThatOfTheWholeLogits) {
  const Batch batch;
  const at::Tensor logits_BSV =
      ((at::arange(2 * 3 * kVocab) * 37).remainder(7) - 3).to(at::kFloat).view({2, 3, kVocab});
  const auto run = [&](const at::Tensor& logits, const LossOptions& options) {
    const at::Tensor leaf = logits.clone().requires_grad_(true);
    const CrossEntropy result = linear_loss(leaf, batch.targets_BS, batch.weight_B, options);
    result.loss.backward();
    return Result{result.loss.detach(), result.sample_sum_B, leaf.grad().clone()};
  };
  const Result whole = run(logits_BSV, {});
  ASSERT_NE(whole.loss.item<double>(), 0);
  for (const int degree : {1, 2, 3, 4, 6}) {
    ThreadWorld world(degree);

    world.run([&](Communicator& tp) {
      const LossOptions options = options_of(tp, 0);
      const VocabShard& shard = options.shard;
      const Result actual = run(own_columns(logits_BSV, shard, 1e3), options);

      EXPECT_TRUE(at::equal(actual.loss, whole.loss));
      EXPECT_TRUE(at::equal(actual.sample_sum_B, whole.sample_sum_B));
      EXPECT_TRUE(at::equal(actual.gradient.narrow(2, 0, shard.count),
                            whole.gradient.narrow(2, shard.begin, shard.count)));
      EXPECT_EQ(actual.gradient.narrow(2, shard.count, shard.rows - shard.count)
                    .count_nonzero()
                    .item<std::int64_t>(),
                0);
    });
    EXPECT_EQ(world.journal().num_calls(0, CollectiveOp::kAllReduce, Purpose::kVocabParallelTarget),
              1U);
  }
}

at::Tensor own_rows(const at::Tensor& whole, const VocabShard& shard, double filler) {
  at::Tensor own = at::full({shard.rows, kHidden}, filler);
  own.narrow(0, 0, shard.count).copy_(whole.narrow(0, shard.begin, shard.count));
  return own.requires_grad_(true);
}

// Integers: every sum is exact. 4 ranks x 3 rows for 10 entries: what pads the last shard holds
// junk.
TEST(VocabParallelLayers, AreBitEqualToTheWholeOnesWhateverPadsThem) {
  const at::Tensor ids_BS = at::tensor(at::ArrayRef<std::int64_t>({0, 9, 3, 5, 3, 7})).view({2, 3});
  const at::Tensor table =
      (at::arange(kVocab * kHidden) * 37).remainder(7).to(at::kFloat).view({kVocab, kHidden}) - 3;
  const at::Tensor cotangent_BSV =
      (at::arange(6 * kVocab) * 11).remainder(5).to(at::kFloat).view({2, 3, kVocab}) - 2;
  const at::Tensor whole_in = table.clone().requires_grad_(true),
                   whole_out = (table + 1).requires_grad_(true);
  const at::Tensor x_BSH = at::embedding(whole_in, ids_BS),
                   logits_BSV = at::linear(x_BSH, whole_out);
  (logits_BSV * cotangent_BSV).sum().backward();
  ThreadWorld world(4);

  world.run([&](Communicator& tp) {
    const TensorParallelStrategy strategy(plan_of(4), tp, 1, 1.0);
    const VocabShard shard = plan_of(4).vocab_shard(tp.rank());
    const at::Tensor own_in = own_rows(table, shard, 777),
                     own_out = own_rows(table + 1, shard, -999);
    const at::Tensor x = strategy.embedding("embed", ids_BS, own_in, nullptr);
    const at::Tensor logits =
        strategy.linear("lm_head", x, own_out, {}, nullptr).narrow(2, 0, shard.count);
    (logits * cotangent_BSV.narrow(2, shard.begin, shard.count)).sum().backward();

    EXPECT_TRUE(at::equal(x, x_BSH));
    EXPECT_TRUE(at::equal(logits, logits_BSV.narrow(2, shard.begin, shard.count)));
    const std::int64_t padding = shard.rows - shard.count;
    for (const auto& [own, whole] : {std::pair{own_in, whole_in}, std::pair{own_out, whole_out}}) {
      EXPECT_TRUE(at::equal(own.grad().narrow(0, 0, shard.count),
                            whole.grad().narrow(0, shard.begin, shard.count)));
      EXPECT_EQ(own.grad().narrow(0, shard.count, padding).count_nonzero().item<std::int64_t>(), 0);
    }
  });
  EXPECT_EQ(world.journal().num_calls(0, CollectiveOp::kAllReduce, Purpose::kVocabParallelEmbed),
            1U);
  EXPECT_EQ(world.journal().num_calls(0, CollectiveOp::kAllReduce, Purpose::kVocabParallelBackward),
            1U);
}

}  // namespace
}  // namespace isoshard
