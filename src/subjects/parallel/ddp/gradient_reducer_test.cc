// SPDX-License-Identifier: Apache-2.0
// Buckets in reverse order, averages over dp, and what parameters without gradient get.
#include "subjects/parallel/ddp/gradient_reducer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;

std::vector<ReducedParameter> parameters_of(const std::vector<std::int64_t>& sizes) {
  std::vector<ReducedParameter> parameters;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    parameters.push_back(
        {"p" + std::to_string(i), ParamClass::kMatrix, at::ones({sizes[i]}).requires_grad_(true)});
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

TEST(BucketAssignment, FollowsAnOrderThatIsGiven) {
  const std::vector<std::size_t> order = {1, 4, 0, 2, 3};

  const auto buckets = bucket_assignment_in_order(parameters_of({10, 10, 10, 10, 10}), order, 80);

  EXPECT_THAT(buckets, ElementsAre(ElementsAre(1, 4), ElementsAre(0, 2), ElementsAre(3)));
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
      loss = loss +
             (parameters[static_cast<std::size_t>(p)].tensor * ((p + 1) * (dp.rank() + 1))).sum();
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

// Gradients become ready in another order than the reversed one, and on rank 2 in another one than
// on rank 0, whose order counts.
TEST(GradientReducer, RebuildsItsBucketsOnceInRankZerosOrder) {
  using Names = std::vector<std::vector<std::string>>;
  ThreadWorld world(3);

  world.run([](Communicator& dp) {
    ASSERT_EQ(dp.size(), 3);
    const std::vector<ReducedParameter> parameters = parameters_of({4, 4, 4, 4});
    GradientReducer reducer(parameters, dp, 32, GradientReducer::Buckets::kRebuiltOnce);
    std::vector<Names> seen;
    for (int step = 0; step < 3; ++step) {
      for (const ReducedParameter& parameter : parameters) parameter.tensor.mutable_grad().reset();
      reducer.arm();
      seen.push_back(reducer.bucket_names());
      // What is used last is ready first; p3 is not used at all, nor p1 on rank 0.
      at::Tensor loss = at::zeros({});
      for (const int p : dp.rank() == 2 || step == 2 ? std::vector<int>{2, 0, 1}
                         : dp.rank() == 0            ? std::vector<int>{0, 2}
                                                     : std::vector<int>{0, 1, 2})
        loss = loss * 1 + (parameters[static_cast<std::size_t>(p)].tensor * (p + 1)).sum();
      loss.backward();
      reducer.finish();
      EXPECT_TRUE(at::allclose(parameters[0].tensor.grad(), at::ones({4}))) << step;
      EXPECT_TRUE(at::allclose(parameters[2].tensor.grad(), at::full({4}, 3.0))) << step;
      EXPECT_TRUE(
          at::allclose(parameters[1].tensor.grad(), at::full({4}, step == 2 ? 2.0 : 4.0 / 3)))
          << step;
    }

    EXPECT_EQ(seen[0], (Names{{"p3", "p2"}, {"p1", "p0"}}));
    EXPECT_EQ(seen[1], (Names{{"p2", "p0"}, {"p3", "p1"}})) << "rank " << dp.rank();
    EXPECT_EQ(seen[2], seen[1]) << "once";
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kAllReduce, Purpose::kGradReduce), 6U);
    EXPECT_EQ(world.journal().num_calls(rank, CollectiveOp::kBroadcast, Purpose::kSetup), 1U);
  }
}

TEST(GradientReducer, OfOneRankRebuildsNothing) {
  ThreadWorld world(1);

  world.run([](Communicator& dp) {
    const std::vector<ReducedParameter> parameters = parameters_of({3, 3});
    GradientReducer reducer(parameters, dp, 4, GradientReducer::Buckets::kRebuiltOnce);
    for (int step = 0; step < 2; ++step) {
      reducer.arm();
      (parameters[1].tensor.sum() * 1 + parameters[0].tensor.sum()).backward();
      reducer.finish();
    }

    EXPECT_EQ(reducer.bucket_names(), (std::vector<std::vector<std::string>>{{"p1"}, {"p0"}}));
  });
  EXPECT_EQ(world.journal().num_calls(0, CollectiveOp::kBroadcast, Purpose::kSetup), 0U);
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
