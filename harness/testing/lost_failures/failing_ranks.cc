// SPDX-License-Identifier: Apache-2.0
// Ways in which the failure of a rank could get lost, in a program with GoogleTest's own main.
// Every test of suite Fails must fail and every test of suite Passes must pass;
// check_lost_failures.cmake runs them. ISOSHARD_TEST_FAILS_IN=environment, parameters, initializer
// or listener makes a world fail there, where no test runs.
#include <ATen/ATen.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/comm/communicator.h"
#include "harness/testing/run_world.h"

namespace {

using isoshard::Axis;
using isoshard::Communicator;
using isoshard::Dtype;
using isoshard::Purpose;
using isoshard::Rank;
using isoshard::Reduction;
using isoshard::run_world;

double summed(Rank& rank, double value) {
  rank.comm()
      .all_reduce({reinterpret_cast<std::byte*>(&value), 1, Dtype::kFloat64}, Reduction::kSum,
                  {.purpose = Purpose::kLossReduce, .axis = Axis::kWorld})
      .wait();
  return value;
}

// Two ranks, the second of which does something after a collective.
void on_rank_1(const std::function<void(Rank&)>& act) {
  run_world(2, [&](Rank& rank) {
    summed(rank, 1);
    if (rank.rank() == 1) act(rank);
  });
}

void failing_world() {
  run_world(2, [](Rank& rank) { EXPECT_EQ(rank.rank(), 0); });
}

bool fails_in(std::string_view place) {
  const char* const value = std::getenv("ISOSHARD_TEST_FAILS_IN");
  return value != nullptr && place == value;
}

TEST(Fails, Expect) {
  failing_world();
}

TEST(Fails, ExpectAfterTheLastCollective) {
  on_rank_1([](Rank& rank) { EXPECT_EQ(rank.rank(), 0); });
}

TEST(Fails, ExpectInTheDecorator) {
  run_world(isoshard::WorldOptions{.size = 2,
                                   .decorate =
                                       [](std::unique_ptr<Communicator> inner, int rank) {
                                         EXPECT_EQ(rank, 0);
                                         return inner;
                                       }},
            [](Rank& rank) { summed(rank, 1); });
}

TEST(Fails, Assert) {
  on_rank_1([](Rank& rank) { ASSERT_EQ(rank.rank(), 0); });
}

TEST(Fails, AssertInAHelper) {
  const auto helper = [](int value) { ASSERT_EQ(value, 0); };
  run_world(2, [&](Rank& rank) {
    helper(rank.rank());
    return summed(rank, 1);
  });
}

TEST(Fails, ExpectInAThread) {
  on_rank_1([](Rank& rank) { std::thread([&] { EXPECT_EQ(rank.rank(), 0); }).join(); });
}

TEST(Fails, ExpectInAWorldOfARank) {
  on_rank_1([](Rank&) { failing_world(); });
}

TEST(Fails, ExitWhileAChildReturns) {
  on_rank_1([](Rank&) {
    if (::fork() != 0) ::_exit(0);
  });
}

TEST(Fails, DeathTestOfALivingStatement) {
  on_rank_1([](Rank&) { EXPECT_DEATH((void)0, ""); });
}

TEST(Fails, DeathTestWithAnotherMessage) {
  on_rank_1([](Rank&) { EXPECT_DEATH(std::abort(), "no such words"); });
}

TEST(Fails, Exception) {
  on_rank_1([](Rank&) { throw std::runtime_error("boom"); });
}

TEST(Fails, ExceptionOfAnyType) {
  on_rank_1([](Rank&) { throw 1; });
}

TEST(Fails, ExceptionInAThread) {
  on_rank_1([](Rank&) { std::thread([] { throw std::bad_alloc(); }).join(); });
}

TEST(Fails, SkippedRank) {
  on_rank_1([](Rank&) { GTEST_SKIP() << "not on this rank"; });
}

TEST(Fails, SkippedAfterTheWorldFailed) {
  failing_world();
  GTEST_SKIP();
}

TEST(Fails, RecordedProperty) {
  on_rank_1([](Rank&) { ::testing::Test::RecordProperty("loss", 1); });
}

TEST(Fails, ExpectedFailureThatDoesNotCome) {
  on_rank_1([](Rank&) { EXPECT_NONFATAL_FAILURE(SUCCEED(), ""); });
}

TEST(Fails, Exit) {
  on_rank_1([](Rank&) { std::exit(0); });
}

TEST(Fails, ExitAtOnce) {
  on_rank_1([](Rank&) { ::_exit(0); });
}

TEST(Fails, QuickExit) {
  on_rank_1([](Rank&) { std::quick_exit(0); });
}

TEST(Fails, AnotherProgram) {
  on_rank_1([](Rank&) { ::execl("/bin/true", "true", nullptr); });
}

TEST(Fails, Signal) {
  on_rank_1([](Rank&) { ::raise(SIGKILL); });
}

TEST(Fails, LeftProcess) {
  on_rank_1([](Rank&) {
    if (::fork() == 0) ::pause();
  });
}

TEST(Fails, MissingCall) {
  run_world(2, [](Rank& rank) {
    if (rank.rank() == 0) summed(rank, 1);
  });
}

TEST(Fails, Trace) {
  on_rank_1([](Rank& rank) {
    SCOPED_TRACE("in the third layer");
    EXPECT_EQ(rank.rank(), 0);
  });
}

// The last one, so that no other test meets the thread.
TEST(Fails, WorldOfAProcessWithThreads) {
  const std::jthread idle([](const std::stop_token& stop) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any().wait(lock, stop, [] { return false; });
  });
  run_world(2, [](Rank&) {});
}

TEST(Passes, SumOfThreeRanks) {
  const std::vector<double> sums =
      run_world(3, [](Rank& rank) { return summed(rank, 1 + rank.rank()); });

  EXPECT_EQ(sums, (std::vector<double>{6, 6, 6}));
}

// On several cores it would start threads, from which no rank can be forked.
TEST(Passes, WorldAfterALargeTensorOperation) {
  const at::Tensor x = at::ones({2'000, 2'000});
  EXPECT_EQ(at::matmul(x, x).sum().item<double>(), 8e9);

  on_rank_1([&](Rank&) { EXPECT_EQ(x.sum().item<double>(), 4e6); });
}

TEST(Passes, DeathTest) {
  on_rank_1([](Rank&) {
    EXPECT_DEATH(std::abort(), "");
    EXPECT_EXIT(std::exit(3), ::testing::ExitedWithCode(3), "");
  });
}

TEST(Passes, ExpectedFailureInARank) {
  on_rank_1([](Rank&) { EXPECT_NONFATAL_FAILURE(ADD_FAILURE() << "wanted", "wanted"); });
}

TEST(Passes, ExpectedFailureOfAWorld) {
  EXPECT_NONFATAL_FAILURE(failing_world(), "[rank 1]");
}

TEST(Passes, NoFatalFailureInAHelper) {
  on_rank_1([](Rank& rank) {
    const auto helper = [](int value) { ASSERT_EQ(value, 1); };
    ASSERT_NO_FATAL_FAILURE(helper(rank.rank()));
    SCOPED_TRACE("no failure to add this to");
  });
}

// With --gtest_break_on_failure and --gtest_throw_on_failure, too.
TEST(Passes, RankGoesOnAfterItsFailures) {
  const isoshard::WorldReport report = isoshard::run_world_report({.size = 2}, [](Rank& rank) {
    EXPECT_EQ(rank.rank(), 0);
    EXPECT_EQ(rank.rank(), 2);
  });

  EXPECT_EQ(report.ranks[1].end, isoshard::RankEnd::kReturned) << report.describe();
  EXPECT_EQ(report.ranks[1].failures.size(), 2U);
}

// The controller lives from repetition to repetition.
TEST(Repeat, FailsTheFirstTimeOnly) {
  static int times = 0;
  if (++times == 1) failing_world();
}

class SetUp : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { failing_world(); }
};
TEST_F(SetUp, Passes) {}

class TearDown : public ::testing::Test {
 protected:
  static void TearDownTestSuite() { failing_world(); }
};
TEST_F(TearDown, Passes) {}

class Environment : public ::testing::Environment {
  void SetUp() override {
    if (fails_in("environment")) failing_world();
  }
};
[[maybe_unused]] auto* const environment = ::testing::AddGlobalTestEnvironment(new Environment);

class Parameters : public ::testing::TestWithParam<int> {};
TEST_P(Parameters, Passes) {}
INSTANTIATE_TEST_SUITE_P(Some, Parameters, ::testing::ValuesIn([] {
                           if (fails_in("parameters")) failing_world();
                           return std::vector<int>{1};
                         }()));

[[maybe_unused]] const bool failed_before_main = [] {
  if (fails_in("initializer")) failing_world();
  return true;
}();

class Listener : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo&) override {
    if (fails_in("listener")) failing_world();
  }
};
[[maybe_unused]] const bool listens = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new Listener);
  return true;
}();

}  // namespace
