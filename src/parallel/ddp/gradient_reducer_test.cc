// SPDX-License-Identifier: Apache-2.0
// Buckets in reverse order, averages over dp, and what parameters without gradient get.
#include "parallel/ddp/gradient_reducer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "comm/thread/thread_world.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;

std::vector<ReducedParameter> parameters_of(const std::vector<std::int64_t>& sizes) {
  std::vector<ReducedParameter> parameters;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    parameters.push_back({"p" + std::to_string(i), ParamClass::kMatrix, at::ones({sizes[i]}).requires_grad_(true)});
  }
  return parameters;
}

TEST(BucketAssignment, FillsFromTheLastParameterUpToTheLimit) {
  const auto buckets = bucket_assignment(parameters_of({10, 10, 10, 10, 10}), 80);

  EXPECT_THAT(buckets, ElementsAre(ElementsAre(4, 3), ElementsAre(2, 1), ElementsAre(0)));
}

TEST(BucketAssignment, AParameterAboveTheLimitClosesItsBucket) {
  const auto buckets = bucket_assignment(parameters_of({4, 100, 4}), 80);

  EXPECT_THAT(buckets, ElementsAre(ElementsAre(2, 1), ElementsAre(0)));
}

TEST(BucketAssignment, FirstBucketIsAtMostOneMebibyte) {
  const std::int64_t mebi = (1 << 20) / 4;

  const auto buckets = bucket_assignment(parameters_of({mebi, mebi, mebi, mebi}), 3 << 20);

  EXPECT_THAT(buckets, ElementsAre(ElementsAre(3), ElementsAre(2, 1, 0)));
}

TEST(BucketAssignment, DtypesDoNotShareABucket) {
  std::vector<ReducedParameter> parameters = parameters_of({10, 10, 10});
  parameters[1].tensor = at::ones({10}, at::kBFloat16).requires_grad_(true);

  const auto buckets = bucket_assignment(parameters, 1 << 10);

  EXPECT_THAT(buckets, ElementsAre(ElementsAre(2, 0), ElementsAre(1)));
  EXPECT_THROW((void)bucket_assignment(parameters, 0), UsageError);
}

TEST(GradientReducer, AveragesOverTheGroupInTheOrderOfBuckets) {
  ThreadWorld world(3);

  world.run([](Communicator& dp) {
    ASSERT_EQ(dp.size(), 3);
    const std::vector<ReducedParameter> parameters = parameters_of({4, 5, 6});
    GradientReducer reducer(parameters, dp, 40);
    ASSERT_EQ(reducer.num_buckets(), 2U);
    reducer.arm();
    at::Tensor loss = at::zeros({});
    // Ranks visit parameters in different orders; the calls must still be the same ones.
    for (int i = 0; i < 3; ++i) {
      const int p = (i + dp.rank()) % 3;
      loss = loss + (parameters[static_cast<std::size_t>(p)].tensor * ((p + 1) * (dp.rank() + 1))).sum();
    }
    loss.backward();
    reducer.finish();

    for (int p = 0; p < 3; ++p) {
      const at::Tensor& gradient = parameters[static_cast<std::size_t>(p)].tensor.grad();
      EXPECT_TRUE(at::equal(gradient, at::full_like(gradient, 2.0 * (p + 1)))) << gradient;
    }
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(world.journal().num_calls(rank), 2U);
    EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kGradReduce), 2U);
  }
}

TEST(GradientReducer, AParameterUnusedOnOneRankEntersAsZeros) {
  ThreadWorld world(2);

  world.run([](Communicator& dp) {
    const std::vector<ReducedParameter> parameters = parameters_of({3, 3});
    GradientReducer reducer(parameters, dp, 1 << 10);
    reducer.arm();
    at::Tensor loss = parameters[0].tensor.sum();
    if (dp.rank() == 1) loss = loss + (parameters[1].tensor * 4).sum();
    loss.backward();
    reducer.finish();

    EXPECT_TRUE(at::equal(parameters[0].tensor.grad(), at::ones({3})));
    EXPECT_TRUE(at::equal(parameters[1].tensor.grad(), at::full({3}, 2.0)));
  });
}

TEST(GradientReducer, ReducesOnlyTheArmedBackwardOfSeveral) {
  ThreadWorld world(2);

  world.run([](Communicator& dp) {
    const std::vector<ReducedParameter> parameters = parameters_of({3});
    GradientReducer reducer(parameters, dp, 1 << 10);
    for (int step = 0; step < 2; ++step) {
      parameters[0].tensor.mutable_grad().reset();
      (parameters[0].tensor * (dp.rank() + 1)).sum().backward();
      reducer.arm();
      (parameters[0].tensor * 10).sum().backward();
      reducer.finish();

      EXPECT_TRUE(at::equal(parameters[0].tensor.grad(), at::full({3}, 11.5)));
    }
    EXPECT_THROW(reducer.finish(), UsageError);
  });
  EXPECT_EQ(world.journal().num_calls(0), 2U);
}

}  // namespace
}  // namespace isoshard
