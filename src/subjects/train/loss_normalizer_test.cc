// SPDX-License-Identifier: Apache-2.0
// Token means with unequal counts, on 3 dp ranks against one process.
#include "subjects/train/loss_normalizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>

#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"

namespace isoshard {
namespace {

// The fault catalogue's counts: 44, 36 and 28 tokens on 3 ranks.
constexpr std::array<std::int64_t, 6> kCounts = {23, 21, 19, 17, 15, 13};
constexpr std::array<double, 6> kSums = {4.0, 1.0, -3.0, 8.0, 16.0, 0.5};

// The average over 3 ranks of sum(weight x token loss).
double averaged(const std::function<std::unique_ptr<LossNormalizer>(Communicator&)>& make) {
  ThreadWorld world(3);
  std::array<double, 3> losses{};
  world.run([&](Communicator& comm) {
    EXPECT_EQ(comm.size(), 3);
    const auto rank = static_cast<std::size_t>(comm.rank());
    const std::vector<double> weights =
        make(comm)->weights(std::span(kCounts).subspan(2 * rank, 2));
    losses[rank] = weights[0] * kSums[2 * rank] + weights[1] * kSums[2 * rank + 1];
  });
  return (losses[0] + losses[1] + losses[2]) / 3;
}

TEST(LossNormalizer, GlobalMeanIsTheMeanOverAllCountedTokens) {
  const double loss =
      averaged([](Communicator& dp) { return std::make_unique<GlobalTokenMean>(dp); });

  EXPECT_DOUBLE_EQ(loss, 26.5 / 108);
}

TEST(LossNormalizer, LocalMeanIsTheMeanOfRankMeansAndAnotherNumber) {
  const double loss = averaged([](Communicator&) { return std::make_unique<GroupTokenMean>(1); });

  EXPECT_DOUBLE_EQ(loss, (5.0 / 44 + 5.0 / 36 + 16.5 / 28) / 3);
  EXPECT_NE(loss, 26.5 / 108);
}

TEST(LossNormalizer, OneProcessWithThreeGroupsMinimizesTheSameLocalMean) {
  const std::vector<double> weights = GroupTokenMean(3).weights(kCounts);

  double loss = 0;
  for (std::size_t i = 0; i < kSums.size(); ++i) loss += weights[i] * kSums[i];
  EXPECT_DOUBLE_EQ(loss, (5.0 / 44 + 5.0 / 36 + 16.5 / 28) / 3);
}

TEST(LossNormalizer, ReportedMeansAreThoseOfTheGroups) {
  const std::array<std::int64_t, 4> counts = {2, 2, 0, 0};
  const std::array<double, 4> sums = {1, 3, 0, 0};

  EXPECT_THAT(group_means(sums, counts, 2), ::testing::ElementsAre(1.0, 0.0));
}

TEST(LossNormalizer, NothingToTakeTheMeanOfIsAnError) {
  const std::array<std::int64_t, 4> counts = {2, 2, 0, 0};
  const std::array<double, 3> sums = {1, 2, 3};
  const std::array<std::int64_t, 3> odd_counts = {1, 1, 1};

  EXPECT_THROW((void)GroupTokenMean(2).weights(counts), UsageError);
  EXPECT_THROW((void)group_means(sums, odd_counts, 2), UsageError);
  ThreadWorld world(1);
  world.run([](Communicator& comm) {
    const std::array<std::int64_t, 2> none = {0, 0};
    EXPECT_THROW((void)GlobalTokenMean(comm).weights(none), UsageError);
  });
}

}  // namespace
}  // namespace isoshard
