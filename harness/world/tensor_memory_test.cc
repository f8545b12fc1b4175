// SPDX-License-Identifier: Apache-2.0
/// Claims about tensors of worlds: the next world takes their memory over, nobody else has it
/// meanwhile, and what it held looks like nothing.
#include "harness/world/tensor_memory.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/memory/memory_pool.h"
#include "core/memory/unwritten.h"
#include "harness/testing/run_world.h"
#include "harness/world/forked/forked_world.h"

namespace isoshard {
namespace {

constexpr std::int64_t kElements = 3 << 20;
constexpr float kMark = 1.5F;

/// Where a rank's first large tensor lies.
std::uintptr_t first_place(Rank&) {
  return reinterpret_cast<std::uintptr_t>(at::full({kElements}, kMark).data_ptr());
}

TEST(TensorMemoryOfWorlds, IsTakenOverByTheNextWorld) {
  const std::vector<std::uintptr_t> first = run_world(1, first_place);
  const std::size_t used = program_pool()->high_water();
  EXPECT_TRUE(program_pool()->holds(reinterpret_cast<const void*>(first.at(0))));

  EXPECT_EQ(run_world(1, first_place), first);
  EXPECT_EQ(program_pool()->high_water(), used);
}

TEST(TensorMemoryOfWorlds, OfAKilledRankIsTakenOverToo) {
  const std::vector<std::uintptr_t> first = run_world(1, first_place);
  const WorldReport report = run_forked({.size = 1, .name = "killed"}, [](Rank&) {
    const at::Tensor held = at::full({kElements}, kMark);
    ::raise(SIGKILL);
  });
  EXPECT_FALSE(report.ok());

  EXPECT_EQ(run_world(1, first_place), first);
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

/// How large the tensors are that nobody writes: an odd number of bytes in 8-bit types, small
/// blocks of each kind, and one of the pool.
constexpr std::int64_t kSizes[] = {1, 7, 1001, 70'001, kElements + 1};

/// What a rank sees of tensors that hold right values, are freed, and are asked for again.
void expect_that_nothing_looks_right() {
  for (const std::int64_t size : kSizes) {
    for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
      EXPECT_TRUE(at::empty({size}, type).isnan().all().item<bool>()) << type << " x " << size;
      (void)at::full({size}, kMark, type);
      const at::Tensor again = at::empty({size}, type);
      EXPECT_TRUE(again.isnan().all().item<bool>()) << type << " x " << size << ", again";
    }
    for (const at::ScalarType type : {at::kShort, at::kInt, at::kLong}) {
      (void)at::ones({size}, type);
      const at::Tensor junk = at::empty({size}, type);
      EXPECT_TRUE(junk.ge(0x7FF1).logical_or(junk.le(-1)).all().item<bool>()) << type;
    }
    (void)at::ones({size}, at::kByte);
    EXPECT_TRUE(at::empty({size}, at::kByte).ge(0x7F).all().item<bool>());
    EXPECT_FALSE(at::zeros({size}).any().item<bool>()) << "zeros are written";
  }
}

constexpr const char* kWithoutPool = "ISOSHARD_TEST_WITHOUT_POOL";

TEST(TensorMemoryOfWorlds, ThatNobodyHasWrittenIsNanInTheFirstWorldAndInLaterOnes) {
  EXPECT_EQ(program_pool() == nullptr, std::getenv(kWithoutPool) != nullptr);
  for (int world = 0; world < 3; ++world) {
    run_world(2, [](Rank& rank) {
      EXPECT_EQ(rank.size(), 2);
      expect_that_nothing_looks_right();
    });
  }
}

// A limit on the size of files leaves this program without a pool: the test above, once more.
TEST(TensorMemoryOfWorlds, ThatNobodyHasWrittenIsNanWhereThereIsNoPool) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{1 << 30, 1 << 30};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ::setenv(kWithoutPool, "1", 1);
    ::execl("/proc/self/exe", "tensor_memory_test",
            "--gtest_filter=*.ThatNobodyHasWrittenIsNanInTheFirstWorldAndInLaterOnes", nullptr);
    ::_exit(2);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(TensorMemoryOfWorlds, ThatGrowsIsNanBeyondWhatItHeld) {
  run_world(1, [](Rank&) {
    for (const std::int64_t size : kSizes) {
      at::Tensor grown = at::full({size}, kMark);
      grown.resize_({size + 3});
      EXPECT_TRUE(grown.narrow(0, 0, size).eq(kMark).all().item<bool>());
      EXPECT_TRUE(grown.narrow(0, size, 3).isnan().all().item<bool>()) << size;
    }
  });
}

TEST(TensorMemoryOfWorlds, ThatNobodyHasWrittenIsNanInAProcessThatARankForks) {
  run_world(1, [](Rank&) {
    const pid_t child = ::fork();
    if (child == 0) {
      bool right = true;
      for (const std::int64_t size : kSizes) {
        (void)at::full({size}, kMark);
        right = right && at::empty({size}).isnan().all().item<bool>();
      }
      ::_exit(right ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  });
}

TEST(TensorMemoryOfWorlds, ThatNobodyHasWrittenHoldsOtherBitsInEachRun) {
  for (const std::int64_t size : kSizes) {
    const auto word = [size](Rank&) { return at::empty({2 * size}, at::kShort)[0].item<int>(); };
    std::set<int> words;
    for (std::uint64_t world = 0; world < kUnwrittenWords; ++world)
      words.insert(run_world(1, word).at(0));
    EXPECT_EQ(words.size(), kUnwrittenWords) << size;
  }
}

TEST(TensorMemoryOfWorlds, ThatCannotBeHadIsToldByItsRankWithItsBytes) {
  const WorldReport report = run_world_report({.size = 2, .name = "short"}, [](Rank& rank) {
    if (rank.rank() == 1) (void)at::empty({std::int64_t{1} << 50}, at::kByte);
  });

  EXPECT_EQ(report.culprit, 1);
  EXPECT_NE(report.cause.find("a tensor of 1125899906842624 bytes was refused: memory is short"),
            std::string::npos)
      << report.cause;
  EXPECT_THROW(require_ok(report), InfrastructureError);
}

}  // namespace
}  // namespace isoshard
