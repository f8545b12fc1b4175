// SPDX-License-Identifier: Apache-2.0
/// Claims about tensors of worlds: the next world takes their memory over, and nobody else has it
/// meanwhile.
#include "harness/world/tensor_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <vector>

#include "harness/testing/run_world.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

constexpr std::int64_t kElements = 3 << 20;
constexpr float kMark = 1.5F;

/// Whether a fresh tensor of a rank has what the last one left.
int marked(Rank&) {
  return at::empty({kElements}).eq(kMark).all().item<bool>() ? 1 : 0;
}

TEST(TensorMemoryOfWorlds, IsTakenOverByTheNextWorld) {
  run_world(2, [](Rank& rank) {
    EXPECT_EQ(rank.size(), 2);
    (void)at::full({kElements}, kMark);
    rank.comm().barrier({Purpose::kSetup, Axis::kWorld});
  });

  EXPECT_EQ(run_world(1, marked), std::vector<int>{1});
}

TEST(TensorMemoryOfWorlds, OfAKilledRankIsTakenOverToo) {
  run_world(1, [](Rank&) { (void)at::zeros({kElements}); });
  const WorldReport report = run_forked({.size = 1, .name = "killed"}, [](Rank&) {
    const at::Tensor held = at::full({kElements}, kMark);
    ::raise(SIGKILL);
  });
  EXPECT_FALSE(report.ok());

  EXPECT_EQ(run_world(1, marked), std::vector<int>{1});
}

TEST(TensorMemoryOfWorlds, IsNotGivenBackByAProcessThatARankForks) {
  run_world(1, [](Rank&) {
    at::Tensor held = at::full({kElements}, kMark);
    const pid_t child = ::fork();
    if (child == 0) {
      held.reset();
      ::_exit(0);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_NE(at::empty({kElements}).data_ptr(), held.data_ptr());
  });
}

}  // namespace
}  // namespace isoshard
