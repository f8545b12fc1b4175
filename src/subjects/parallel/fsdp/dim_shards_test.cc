// SPDX-License-Identifier: Apache-2.0
// Chunks as torch.chunk makes them, and blocks by name.
#include "subjects/parallel/fsdp/dim_shards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;

TEST(DimShards, AreCeilSizedChunksOfRows) {
  const DimShards even = dim0_shards({6, 4}, 3), uneven = dim0_shards({48, 5}, 5),
                  few = dim0_shards({1}, 3), gap = dim0_shards({5, 2}, 4);

  EXPECT_THAT(even.rows, ElementsAre(Range{0, 2}, Range{2, 2}, Range{4, 2}));
  EXPECT_THAT(even.elements, ElementsAre(Range{0, 8}, Range{8, 8}, Range{16, 8}));
  EXPECT_EQ(even.padded, 8);
  EXPECT_THAT(uneven.rows,
              ElementsAre(Range{0, 10}, Range{10, 10}, Range{20, 10}, Range{30, 10}, Range{40, 8}));
  EXPECT_EQ(uneven.padded, 50);
  EXPECT_THAT(few.rows, ElementsAre(Range{0, 1}, Range{1, 0}, Range{1, 0}));
  EXPECT_EQ(few.padded, 1);
  EXPECT_THAT(gap.rows, ElementsAre(Range{0, 2}, Range{2, 2}, Range{4, 1}, Range{5, 0}));
}

TEST(DimShards, NeedADimAndARank) {
  EXPECT_THROW((void)dim0_shards({}, 2), ShapeError);
  EXPECT_THROW((void)dim0_shards({2}, 0), UsageError);
}

}  // namespace
}  // namespace isoshard
