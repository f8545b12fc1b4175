// SPDX-License-Identifier: Apache-2.0
#include "harness/ranks/isoshard_ranks.h"
#include <gtest/gtest.h>
TEST(RanksInC, Opens) { EXPECT_EQ(isoshard_ranks_abi(), 1); }
TEST(RankStatistics, Dummy) {}
