// SPDX-License-Identifier: Apache-2.0
/// 500 tiny tests, each in two fresh processes with one all-reduce: what a suite of multi-process
/// tests costs.
///
///     time tiny_tests_bench --gtest_brief=1
///     mpirun -n 2 tiny_tests_bench --gtest_brief=1 --attach   in processes of mpirun, not fresh
#include <gtest/gtest.h>

#include <vector>

#include "harness/testing/run_world.h"

namespace isoshard {
namespace {

class TinyTest : public testing::TestWithParam<int> {};

TEST_P(TinyTest, AddsOverTwoFreshProcesses) {
  const std::vector<double> sums = run_world(2, [](Rank& rank) {
    double value = GetParam() + rank.rank();
    EXPECT_EQ(rank.size(), 2);
    rank.comm()
        .all_reduce({reinterpret_cast<std::byte*>(&value), 1, Dtype::kFloat64}, Reduction::kSum,
                    {Purpose::kGradReduce, Axis::kDp})
        .wait();
    return value;
  });

  EXPECT_EQ(sums, std::vector<double>(2, 2 * GetParam() + 1));
}

INSTANTIATE_TEST_SUITE_P(FiveHundred, TinyTest, testing::Range(0, 500));

}  // namespace
}  // namespace isoshard
