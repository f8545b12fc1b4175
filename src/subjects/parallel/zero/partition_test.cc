// SPDX-License-Identifier: Apache-2.0
// Flat partitions and buckets, on sizes small enough to write down.
#include "subjects/parallel/zero/partition.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;

TEST(ZeroPartition, CutsInsideAParameterAndPadsTheEnd) {
  // 13 elements: 3 parts of 6, as parts are even
  const std::vector<std::int64_t> numels = {5, 1, 7};

  const ZeroPartition partition = zero_partition(numels, 3);

  EXPECT_EQ(partition.part_numel, 6);
  EXPECT_EQ(partition.padded_numel(), 18);
  EXPECT_THAT(partition.offsets, ElementsAre(0, 5, 6));
  EXPECT_THAT(partition.runs[0], ElementsAre(Range{0, 5}, Range{}, Range{}));
  EXPECT_THAT(partition.runs[1], ElementsAre(Range{0, 1}, Range{}, Range{}));
  EXPECT_THAT(partition.runs[2], ElementsAre(Range{}, Range{0, 6}, Range{6, 1}));
}

TEST(ZeroPartition, OfOneRankIsEverything) {
  const std::vector<std::int64_t> numels = {3, 4};

  const ZeroPartition partition = zero_partition(numels, 1);

  EXPECT_THAT(partition.runs[0], ElementsAre(Range{0, 3}));
  EXPECT_THAT(partition.runs[1], ElementsAre(Range{0, 4}));
}

TEST(ZeroPartition, NeedsARank) {
  EXPECT_THROW((void)zero_partition({}, 0), UsageError);
}

// From the last parameter to the first; 4 fills a bucket of 4 exactly, 9 is larger than one.
TEST(ZeroBuckets, CloseBeforeTheyWouldBeTooLarge) {
  const std::vector<std::int64_t> numels = {1, 4, 9, 2, 2};

  EXPECT_THAT(zero_buckets(numels, 4),
              ElementsAre(ElementsAre(4, 3), ElementsAre(2), ElementsAre(1), ElementsAre(0)));
  EXPECT_THAT(zero_buckets(numels, 100), ElementsAre(ElementsAre(4, 3, 2, 1, 0)));
  EXPECT_THROW((void)zero_buckets(numels, 0), UsageError);
}

}  // namespace
}  // namespace isoshard
