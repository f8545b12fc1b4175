// SPDX-License-Identifier: Apache-2.0
// Which tokens each cp rank has, and where they lie.
#include "subjects/parallel/nd/context_split.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

std::vector<std::int64_t> numbers(const at::Tensor& tensor) {
  const auto* const data = tensor.const_data_ptr<std::int64_t>();
  return {data, data + tensor.numel()};
}

// As torch's context_parallel deals them: chunks r and 2 cp - 1 - r.
TEST(ContextSplit, GivesEachRankAHeadAndATail) {
  EXPECT_EQ(numbers(ContextSplit(ContextOrder::kHeadTail, 2, 0).positions(8)),
            (std::vector<std::int64_t>{0, 1, 6, 7}));
  EXPECT_EQ(numbers(ContextSplit(ContextOrder::kHeadTail, 2, 1).positions(8)),
            (std::vector<std::int64_t>{2, 3, 4, 5}));
  EXPECT_EQ(numbers(ContextSplit(ContextOrder::kContiguous, 2, 1).positions(8)),
            (std::vector<std::int64_t>{4, 5, 6, 7}));
}

TEST(ContextSplit, GivesEveryTokenToOneRank) {
  for (const ContextOrder order : {ContextOrder::kHeadTail, ContextOrder::kContiguous}) {
    for (const int cp : {1, 2, 3, 4, 5}) {
      std::multiset<std::int64_t> all;
      for (int rank = 0; rank < cp; ++rank) {
        const std::vector<std::int64_t> own = numbers(ContextSplit(order, cp, rank).positions(120));
        EXPECT_EQ(own.size(), 120U / static_cast<unsigned>(cp));
        all.insert(own.begin(), own.end());
      }
      EXPECT_EQ(all.size(), 120U);
      EXPECT_EQ(std::set<std::int64_t>(all.begin(), all.end()).size(), 120U);
    }
  }
}

TEST(ContextSplit, PutsGatheredPartsBackInOrder) {
  const at::Tensor whole = at::arange(24, at::kLong).view({2, 12});
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < 3; ++rank)
    parts.push_back(ContextSplit(ContextOrder::kHeadTail, 3, rank).own_part(whole, 1));

  const at::Tensor places = ContextSplit(ContextOrder::kHeadTail, 3, 0).places_of_gathered(12);

  EXPECT_TRUE(at::equal(at::cat(parts, 1).index_select(1, places), whole));
}

// Rank 1 of 2 has the samples of dp rank 0 and the tokens 2 to 5 of 8, in one box.
TEST(ContextSplit, SaysWhereTokensLie) {
  const MeshShape mesh({{Axis::kDp, 2}, {Axis::kCp, 2}});
  Layout local = replicated({3, 4, 5});
  local.global_shape[0] = 6;
  local.placements.push_back(shard(Axis::kDp, 0));

  const Layout middle = ContextSplit(ContextOrder::kHeadTail, 2, 1).over_tokens(local, 1, mesh, 1);
  const Layout ends = ContextSplit(ContextOrder::kHeadTail, 2, 0).over_tokens(local, 1, mesh, 2);

  EXPECT_EQ(middle.global_shape, (Shape{6, 8, 5}));
  const std::vector<Box> one = boxes_of(middle, mesh, 1), two = boxes_of(ends, mesh, 2);
  ASSERT_EQ(one.size(), 1U);
  EXPECT_EQ(one[0].global_offset, (Shape{0, 2, 0}));
  EXPECT_EQ(one[0].size, (Shape{3, 4, 5}));
  ASSERT_EQ(two.size(), 2U);
  EXPECT_EQ(two[0].global_offset, (Shape{3, 0, 0}));
  EXPECT_EQ(two[1].local_offset, (Shape{0, 2, 0}));
  EXPECT_EQ(two[1].global_offset, (Shape{3, 6, 0}));
  EXPECT_EQ(two[1].size, (Shape{3, 2, 5}));
}

TEST(ContextSplit, RefusesALengthThatDoesNotDivide) {
  EXPECT_THROW((void)ContextSplit(ContextOrder::kHeadTail, 2, 0).positions(6), ShapeError);
  EXPECT_NO_THROW((void)ContextSplit(ContextOrder::kContiguous, 2, 0).positions(6));
}

}  // namespace
}  // namespace isoshard
