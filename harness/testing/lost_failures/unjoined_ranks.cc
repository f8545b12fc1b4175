// SPDX-License-Identifier: Apache-2.0
// Ranks with expectations in a program that has no run_world, for example because it calls
// verify_runs. Every test of suite Fails must fail and every test of suite Passes must pass.
#include <gtest/gtest.h>

#include "harness/world/forked/forked_world.h"

namespace {

using isoshard::Rank;

TEST(Fails, Expect) {
  isoshard::require_ok(
      isoshard::run_forked({.size = 2}, [](Rank& rank) { EXPECT_EQ(rank.rank(), 0); }));
}

TEST(Fails, Assert) {
  isoshard::require_ok(
      isoshard::run_forked({.size = 2}, [](Rank& rank) { ASSERT_EQ(rank.rank(), 0); }));
}

TEST(Passes, Expect) {
  isoshard::require_ok(
      isoshard::run_forked({.size = 2}, [](Rank& rank) { EXPECT_EQ(rank.size(), 2); }));
}

}  // namespace
