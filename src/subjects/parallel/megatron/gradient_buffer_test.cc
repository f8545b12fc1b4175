// SPDX-License-Identifier: Apache-2.0
// Buckets of the gradient buffer: order, padding, and that dp ranks share out every element once.
#include "subjects/parallel/megatron/gradient_buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;

TEST(GradientBuffer, TakesParametersFromTheLastToTheFirst) {
  const std::vector<std::int64_t> numels = {10, 20, 30, 5};

  const std::vector<BufferBucket> buckets = buffer_buckets(numels, 35, 2, false);

  ASSERT_EQ(buckets.size(), 2U);
  EXPECT_THAT(buckets[0].parameters, ElementsAre(3, 2));
  EXPECT_THAT(buckets[0].begins, ElementsAre(0, 5));
  EXPECT_EQ(buckets[0].numel, 35);
  EXPECT_THAT(buckets[1].parameters, ElementsAre(1, 0));
  EXPECT_EQ(buckets[1].numel, 30);
}

TEST(GradientBuffer, AlignsParametersAndBucketsForTheDistributedOptimizer) {
  const std::vector<std::int64_t> numels = {65, 64, 1};

  const std::vector<BufferBucket> buckets = buffer_buckets(numels, 1 << 20, 3, true);

  ASSERT_EQ(buckets.size(), 1U);
  EXPECT_THAT(buckets[0].begins, ElementsAre(0, 64, 128));
  EXPECT_EQ(buckets[0].numel, 384);  // 193 up to lcm(128, 3)
}

TEST(GradientBuffer, GivesEveryElementToOneRank) {
  for (const int dp : {1, 2, 3, 5}) {
    const std::vector<std::int64_t> numels = {7, 1000, 64, 129, 3, 500};
    for (const BufferBucket& bucket : buffer_buckets(numels, 600, dp, true)) {
      ASSERT_EQ(bucket.numel % dp, 0);
      for (std::size_t i = 0; i < bucket.parameters.size(); ++i) {
        const std::int64_t numel = numels[bucket.parameters[i]];
        std::int64_t next = 0;
        for (int rank = 0; rank < dp; ++rank) {
          const Range run = owned_run(bucket, bucket.begins[i], numel, dp, rank);
          if (run.count == 0) continue;
          EXPECT_EQ(run.begin, next);
          next += run.count;
        }
        EXPECT_EQ(next, numel);
      }
    }
  }
}

TEST(GradientBuffer, IsOfFp32AndOfFp64ForFp64Parameters) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16})
    EXPECT_EQ(main_gradient_dtype(dtype), Dtype::kFloat32);
  EXPECT_EQ(main_gradient_dtype(Dtype::kFloat64), Dtype::kFloat64);
}

TEST(GradientBuffer, RefusesWhatIsNoBucket) {
  const std::vector<std::int64_t> numels = {1};

  EXPECT_THROW((void)buffer_buckets(numels, 0, 1, false), UsageError);
  EXPECT_THROW((void)buffer_buckets(numels, 1, 0, false), UsageError);
}

}  // namespace
}  // namespace isoshard
