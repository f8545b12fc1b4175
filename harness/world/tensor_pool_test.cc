// SPDX-License-Identifier: Apache-2.0
/// Claims about memory that worlds take over from each other: nobody shares it, nothing is lost, and it is really taken over.
#include "harness/world/tensor_pool.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <vector>

#include "harness/testing/run_world.h"
#include "harness/world/forked_world.h"

namespace isoshard {
namespace {

constexpr std::size_t kExtent = TensorPool::kExtentBytes;

TEST(TensorPool, GivesTheLowestFreePieceToOneOwner) {
  TensorPool pool(16 * kExtent);
  std::byte* const a = pool.take(kExtent + 1, 1);
  std::byte* const b = pool.take(kExtent, 2);
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(b, a + 2 * kExtent);
  EXPECT_EQ(pool.take(6 * kExtent, 1), nullptr) << "5 are left";

  pool.give_back(a);
  EXPECT_EQ(pool.take(3 * kExtent, 1), a + 3 * kExtent) << "before b there are two";
  EXPECT_EQ(pool.take(2 * kExtent, 1), a);
  EXPECT_TRUE(pool.holds(a) && !pool.holds(a + 8 * kExtent));
  EXPECT_EQ(pool.high_water(), (8 + 6) * kExtent);
}

TEST(TensorPool, KeepsSmallPiecesOutOfTheGapsOfLargeOnes) {
  constexpr std::size_t kLarge = 16 * kExtent;
  TensorPool pool(96 * kExtent);
  std::byte* const a = pool.take(kLarge, 1);
  std::byte* const b = pool.take(kLarge, 1);
  EXPECT_EQ(b, a + kLarge);
  pool.give_back(a);
  std::byte* const small = pool.take(kExtent, 1);
  EXPECT_EQ(small, a + 48 * kExtent);
  EXPECT_EQ(pool.take(kLarge, 1), a);
}

TEST(TensorPool, ReclaimsWhatAProcessOwnedThatIsGone) {
  TensorPool pool(8 * kExtent);
  std::byte* const a = pool.take(kExtent, 1);
  std::byte* const b = pool.take(kExtent, 2);
  ASSERT_NE(pool.take(2 * kExtent, 1), nullptr);
  pool.reclaim(1);

  EXPECT_EQ(pool.take(kExtent, 3), a);
  EXPECT_EQ(pool.take(2 * kExtent, 3), b + kExtent) << "b is still owned";
}

TEST(TensorPool, TrimmingFreesMemoryAndLeavesWhatIsOwned) {
  TensorPool pool(8 * kExtent);
  std::byte* const owned = pool.take(kExtent, ::getpid());
  std::byte* const free = pool.take(kExtent, ::getpid());
  std::memset(owned, 1, kExtent);
  std::memset(free, 1, kExtent);
  pool.give_back(free);
  pool.trim();

  EXPECT_EQ(pool.take(kExtent, ::getpid()), free);
  EXPECT_EQ(std::count(free, free + kExtent, std::byte{0}), static_cast<std::ptrdiff_t>(kExtent));
  EXPECT_EQ(std::count(owned, owned + kExtent, std::byte{1}), static_cast<std::ptrdiff_t>(kExtent));
}

// Each process marks what it holds and looks whether the marks stay.
TEST(TensorPool, ProcessesThatTakeAtOnceNeverShare) {
  TensorPool pool(24 * kExtent);
  constexpr int kProcesses = 4, kRounds = 3000;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = ::fork();
    if (child == 0) {
      const pid_t self = ::getpid();
      bool right = true;
      for (int round = 0; right && round < kRounds; ++round) {
        const std::size_t bytes = kExtent * static_cast<std::size_t>(1 + (round + p) % 3);
        std::byte* const data = pool.take(bytes, self);
        if (data == nullptr) continue;
        for (std::size_t at = 0; at < bytes; at += kExtent) std::memcpy(data + at, &self, sizeof self);
        for (std::size_t at = 0; at < bytes; at += kExtent) right = right && std::memcmp(data + at, &self, sizeof self) == 0;
        pool.give_back(data);
      }
      ::_exit(right ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "a process found another one's mark in its memory, or crashed";
  }
}

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
