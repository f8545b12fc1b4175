// SPDX-License-Identifier: Apache-2.0
/// What a forked world gives: fresh ranks, their values in order, their output, and nothing left behind.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "harness/testing/run_world.h"

namespace isoshard {
namespace {

double summed(Rank& rank, double value) {
  rank.comm().all_reduce({reinterpret_cast<std::byte*>(&value), 1, Dtype::kFloat64}, Reduction::kSum, {Purpose::kLossReduce, Axis::kWorld}).wait();
  return value;
}

TEST(ForkedWorld, ReturnsOneValuePerRankInRankOrder) {
  const std::vector<double> sums = run_world(3, [](Rank& rank) { return summed(rank, 1 + rank.rank()) * 10 + rank.rank(); });

  EXPECT_EQ(sums, (std::vector<double>{60, 61, 62}));
}

}  // namespace
}  // namespace isoshard
