// SPDX-License-Identifier: Apache-2.0
/// Claims about meeting threads: each gets the sum, and a tensor of its own.
#include "suite/emulation/emulated_world.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "core/base/error.h"
#include "core/mesh/degrees.h"

namespace isoshard {
namespace {

// A rank that comes back early writes into its result while others still take theirs.
TEST(EmulatedWorld, WhatARankDoesToItsResultIsNotSeenByOthers) {
  constexpr int kRanks = 4, kRounds = 30;
  constexpr std::int64_t kElements = 2 << 20;
  EmulatedWorld world(mesh_of({.dp = 2, .tp = 2}));
  std::atomic<int> wrong{0};
  world.run(1, [&](int rank) {
    for (int round = 0; round < kRounds; ++round) {
      const at::Tensor part = at::full({kElements}, rank + round);
      at::Tensor sum = world.reduce(rank, {0, 1, 2, 3}, "sum", part, {});
      const float expected = 6 + kRanks * round;
      if (!sum.eq(expected).all().item<bool>()) ++wrong;
      sum.zero_();
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(EmulatedWorld, NoMoreRanksComputeAtOnceThanAsked) {
  for (const int num_at_once : {1, 2}) {
    EmulatedWorld world(mesh_of({.dp = 2, .tp = 3}), num_at_once);
    std::atomic<int> computing{0}, most{0}, finished{0};
    world.run(1, [&](int rank) {
      for (int round = 0; round < 50; ++round) {
        const int now = ++computing;
        for (int seen = most; seen < now && !most.compare_exchange_weak(seen, now);) {
        }
        std::this_thread::yield();
        --computing;
        (void)world.reduce_over(Axis::kTp, rank, "tp", at::ones({3}), {});
        (void)world.reduce_over(Axis::kDp, rank, "dp", at::ones({3}), {});
      }
      ++finished;
    });
    EXPECT_EQ(finished, 6);
    EXPECT_LE(most, num_at_once);
  }
}

// Those that wait for a core, too.
TEST(EmulatedWorld, ARankThatFailsReleasesAllOthers) {
  EmulatedWorld world(mesh_of({.dp = 2, .tp = 2}), 1);
  std::atomic<int> finished{0};

  EXPECT_THROW(world.run(1,
                         [&](int rank) {
                           (void)world.reduce_over(Axis::kTp, rank, "tp", at::ones({3}), {});
                           if (rank == 2) throw UsageError("rank 2");
                           (void)world.reduce(rank, {0, 1, 2, 3}, "all", at::ones({3}), {});
                           ++finished;
                         }),
               UsageError);
  EXPECT_EQ(finished, 0);
}

}  // namespace
}  // namespace isoshard
