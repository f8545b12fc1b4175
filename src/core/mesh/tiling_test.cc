// SPDX-License-Identifier: Apache-2.0
// Gaps and overlaps of boxes and flat ranges, small by hand,
// random against a brute count, and thousands at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/philox.h"
#include "core/mesh/layout.h"

namespace isoshard {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

Box box(Shape offset, Shape size) {
  return {Shape(offset.size(), 0), std::move(offset), std::move(size)};
}

/// A rows x cols grid of boxes of 3 x 2 elements.
std::vector<Box> grid(std::int64_t rows, std::int64_t cols) {
  std::vector<Box> boxes;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) boxes.push_back(box({3 * r, 2 * c}, {3, 2}));
  }
  return boxes;
}

TEST(BoxTiling, AGapIsNamedByItsFirstElement) {
  EXPECT_THAT(tiling_problem({4, 4}, std::vector<Box>{box({0, 0}, {2, 4}), box({2, 0}, {2, 3})}),
              StartsWith("gap: no rank holds element [2, 3]; 14 of 16"));
  EXPECT_THAT(tiling_problem({4, 4}, std::vector<Box>{}),
              StartsWith("gap: no rank holds element [0, 0]"));
  EXPECT_THAT(tiling_problem({}, std::vector<Box>{}), StartsWith("gap"));
  EXPECT_THAT(tiling_problem({3}, std::vector<Box>{box({0}, {1}), box({2}, {1})}),
              HasSubstr("[1]"));
}

TEST(BoxTiling, AnOverlapIsNamedEvenWhenTheVolumesAddUp) {
  const std::string problem =
      tiling_problem({4, 4}, std::vector<Box>{box({0, 0}, {2, 4}), box({1, 0}, {2, 4})});

  EXPECT_THAT(
      problem,
      StartsWith("overlap: the boxes offset [0, 0] size [2, 4] and offset [1, 0] size [2, 4]"));
  EXPECT_THAT(problem, HasSubstr("element [1, 0]"));
}

TEST(BoxTiling, ReplicasCountOnceAndEmptyBoxesNotAtAll) {
  EXPECT_EQ(tiling_problem(
                {4}, std::vector<Box>{box({0}, {2}), box({2}, {2}), box({0}, {2}), box({1}, {0})}),
            "");
}

TEST(BoxTiling, ABoxOutsideIsAnError) {
  EXPECT_THROW((void)tiling_problem({4}, std::vector<Box>{box({3}, {2})}), MeshError);
  EXPECT_THROW((void)tiling_problem({4}, std::vector<Box>{box({-1}, {2})}), MeshError);
  EXPECT_THROW((void)tiling_problem({4}, std::vector<Box>{box({0, 0}, {4, 1})}), MeshError);
  EXPECT_THROW((void)tiling_problem({4}, std::vector<Box>{box({2}, {INT64_MAX})}), MeshError);
  EXPECT_THROW((void)tiling_problem({4}, std::vector<Box>{box({0}, {-1})}), MeshError);
}

TEST(BoxTiling, ThousandsOfBoxesAreTiledAndOneMissingIsFound) {
  std::vector<Box> boxes = grid(80, 100);
  EXPECT_EQ(tiling_problem({240, 200}, boxes), "");

  std::reverse(boxes.begin(), boxes.end());
  boxes.erase(std::find(boxes.begin(), boxes.end(), box({237, 100}, {3, 2})));

  EXPECT_THAT(tiling_problem({240, 200}, boxes), HasSubstr("[237, 100]"));
}

TEST(BoxTiling, RandomBoxesAreJudgedAsByCountingElements) {
  std::uint64_t draws = 0;
  const auto draw = [&](std::int64_t limit) {
    return static_cast<std::int64_t>(random_bits(11, "tiling", draws++) %
                                     static_cast<std::uint64_t>(limit));
  };
  int tiled = 0, gaps = 0, overlaps = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::vector<Box> boxes;
    const std::int64_t row = draw(5), col = draw(5);
    if (row > 0) boxes.push_back(box({0, 0}, {row, 4}));
    if (row < 4 && col > 0) boxes.push_back(box({row, 0}, {4 - row, col}));
    if (row < 4 && col < 4) boxes.push_back(box({row, col}, {4 - row, 4 - col}));
    if (draw(3) == 0) boxes.erase(boxes.begin() + draw(static_cast<std::int64_t>(boxes.size())));
    if (draw(3) == 0) boxes.push_back(box({draw(3), draw(3)}, {1 + draw(2), 1 + draw(2)}));
    std::vector<int> count(16, 0);
    std::vector<Box> distinct;
    for (const Box& b : boxes) {
      if (std::find(distinct.begin(), distinct.end(), b) != distinct.end()) continue;
      distinct.push_back(b);
      for (std::int64_t i = 0; i < b.size[0]; ++i) {
        for (std::int64_t j = 0; j < b.size[1]; ++j)
          ++count[static_cast<std::size_t>((b.global_offset[0] + i) * 4 + b.global_offset[1] + j)];
      }
    }

    const std::string problem = tiling_problem({4, 4}, boxes);

    if (*std::max_element(count.begin(), count.end()) > 1) {
      ASSERT_THAT(problem, StartsWith("overlap")) << trial;
      ++overlaps;
    } else if (const auto gap = std::find(count.begin(), count.end(), 0); gap != count.end()) {
      const auto flat = gap - count.begin();
      ASSERT_THAT(problem, StartsWith("gap: no rank holds element [" + std::to_string(flat / 4) +
                                      ", " + std::to_string(flat % 4) + "]"));
      ++gaps;
    } else {
      ASSERT_EQ(problem, "") << trial;
      ++tiled;
    }
  }
  EXPECT_GT(tiled, 300);
  EXPECT_GT(gaps, 300);
  EXPECT_GT(overlaps, 300);
}

TEST(FlatTiling, RangesThatCutRowsTile) {
  EXPECT_EQ(
      tiling_problem({3, 5}, std::vector<FlatRange>{{0, 8, 7}, {0, 0, 8}, {3, 0, 8}, {0, 4, 0}}),
      "");
}

TEST(FlatTiling, GapsAndOverlapsAreNamed) {
  EXPECT_EQ(tiling_problem({3, 5}, std::vector<FlatRange>{{0, 0, 7}, {0, 8, 7}}),
            "gap: no rank holds flat element 7 of 15");
  EXPECT_EQ(tiling_problem({3, 5}, std::vector<FlatRange>{{0, 0, 14}}),
            "gap: no rank holds flat element 14 of 15");
  EXPECT_EQ(tiling_problem({3, 5}, std::vector<FlatRange>{}),
            "gap: no rank holds flat element 0 of 15");
  EXPECT_THAT(tiling_problem({3, 5}, std::vector<FlatRange>{{0, 0, 8}, {0, 7, 8}}),
              StartsWith("overlap: the flat ranges [0, 8) and [7, 15)"));
  EXPECT_THROW((void)tiling_problem({3, 5}, std::vector<FlatRange>{{0, 10, 6}}), MeshError);
  EXPECT_THROW((void)tiling_problem({3, 5}, std::vector<FlatRange>{{0, -1, 6}}), MeshError);
}

}  // namespace
}  // namespace isoshard
