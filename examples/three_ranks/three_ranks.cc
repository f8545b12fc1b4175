// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/comm/tensor.h"
#include "harness/testing/run_world.h"

TEST(RowParallelLinear, EqualsOneProcess) {
  const at::Tensor x = at::arange(12.0).view({2, 6}), weight = at::arange(24.0).view({6, 4});
  isoshard::run_world(3, [&](isoshard::Rank& rank) {  // the body runs in three processes
    at::Tensor y = x.chunk(3, 1)[rank.rank()].matmul(weight.chunk(3, 0)[rank.rank()]);
    all_reduce(rank.comm(), y, isoshard::Reduction::kSum, {}).wait();
    EXPECT_TRUE(at::equal(y, x.matmul(weight)));
  });
}
