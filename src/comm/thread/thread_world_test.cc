// SPDX-License-Identifier: Apache-2.0
/// How a world of threads ends: mismatches, aborts, deadlines, deadlocks; and that groups are what split promises.
#include "comm/thread/thread_world.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <mutex>
#include <vector>

#include "base/error.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::SizeIs;
using namespace std::chrono_literals;

constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kDp};

Buffer buffer_of(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()), Dtype::kFloat32};
}

/// Runs body on every rank and returns what each rank's CommError said.
std::vector<std::string> failures_of(ThreadWorld& world, const std::function<void(Communicator&)>& body) {
  std::vector<std::string> failures;
  std::mutex mutex;
  world.run([&](Communicator& comm) {
    try {
      body(comm);
    } catch (const CommError& error) {
      const std::lock_guard lock(mutex);
      failures.emplace_back(error.what());
    }
  });
  return failures;
}

struct Mismatch {
  const char* name;
  std::function<void(Communicator&)> body;  ///< rank 1's call differs
  const char* first;                        ///< what rank 0's call is called
  const char* second;
};

class MismatchedCalls : public testing::TestWithParam<Mismatch> {};

TEST_P(MismatchedCalls, AreNamedOnEveryRank) {
  for (const int num_ranks : {2, 3, 5}) {
    ThreadWorld world(num_ranks);

    const auto failures = failures_of(world, GetParam().body);

    ASSERT_THAT(failures, SizeIs(num_ranks));
    EXPECT_THAT(failures, Each(AllOf(HasSubstr("collectives differ"), HasSubstr(fmt::format("rank 0 called {}", GetParam().first)),
                                     HasSubstr(fmt::format("rank 1 called {}", GetParam().second)))));
    EXPECT_TRUE(world.is_aborted());
    EXPECT_THROW(world.run([](Communicator&) {}), CommError);
  }
}

void reduce(Communicator& comm, std::size_t count, Reduction reduction = Reduction::kSum, Purpose purpose = Purpose::kGradReduce) {
  std::vector<float> values(count);
  comm.all_reduce(buffer_of(values), reduction, {purpose, Axis::kDp}).wait();
}

void reduce_doubles(Communicator& comm) {
  std::vector<double> values(8);
  comm.all_reduce({reinterpret_cast<std::byte*>(values.data()), 8, Dtype::kFloat64}, Reduction::kSum, kInfo).wait();
}

const std::array kMismatches = {
    Mismatch{"Op", [](Communicator& c) { c.rank() == 1 ? c.barrier(kInfo) : reduce(c, 8); }, "all_reduce #1", "barrier #1"},
    Mismatch{"Dtype", [](Communicator& c) { c.rank() == 1 ? reduce_doubles(c) : reduce(c, 8); },
             "all_reduce #1 (grad_reduce, dp, sum, fp32 x 8)", "all_reduce #1 (grad_reduce, dp, sum, fp64 x 8)"},
    Mismatch{"Count", [](Communicator& c) { reduce(c, c.rank() == 1 ? 9 : 8); }, "all_reduce #1 (grad_reduce, dp, sum, fp32 x 8)",
             "all_reduce #1 (grad_reduce, dp, sum, fp32 x 9)"},
    Mismatch{"CountAcrossPaths", [](Communicator& c) { reduce(c, c.rank() == 1 ? 1000000 : 8); }, "all_reduce #1", "all_reduce #1"},
    Mismatch{"Reduction", [](Communicator& c) { reduce(c, 8, c.rank() == 1 ? Reduction::kMax : Reduction::kSum); },
             "all_reduce #1 (grad_reduce, dp, sum, fp32 x 8)", "all_reduce #1 (grad_reduce, dp, max, fp32 x 8)"},
    Mismatch{"Purpose", [](Communicator& c) { reduce(c, 8, Reduction::kSum, c.rank() == 1 ? Purpose::kClipNorm : Purpose::kGradReduce); },
             "all_reduce #1 (grad_reduce", "all_reduce #1 (clip_norm"},
    Mismatch{"Root",
             [](Communicator& c) {
               std::vector<float> values(8);
               c.broadcast(buffer_of(values), c.rank() == 1 ? 1 : 0, kInfo).wait();
             },
             "broadcast #1 (grad_reduce, dp, root 0", "broadcast #1 (grad_reduce, dp, root 1"},
    Mismatch{"Later",
             [](Communicator& c) {
               for (int call = 0; call < 3; ++call) reduce(c, 100000);
               reduce(c, c.rank() == 1 ? 100001 : 100000);
             },
             "all_reduce #4 (grad_reduce, dp, sum, fp32 x 100000)", "all_reduce #4 (grad_reduce, dp, sum, fp32 x 100001)"}};

INSTANTIATE_TEST_SUITE_P(Thread, MismatchedCalls, testing::ValuesIn(kMismatches),
                         [](const auto& mismatch) { return std::string(mismatch.param.name); });

TEST(ThreadWorld, RethrowsTheFirstExceptionAndReleasesTheOthers) {
  ThreadWorld world(4);

  EXPECT_THROW(world.run([](Communicator& comm) {
    if (comm.rank() == 2) throw ShapeError("planted");
    comm.barrier(kInfo);
  }),
               ShapeError);
}

TEST(ThreadWorld, AbortByARankReleasesBlockedRanksWithItsReason) {
  ThreadWorld world(3);

  const auto failures = failures_of(world, [](Communicator& comm) {
    if (comm.rank() == 1) comm.abort("rank 1 gives up");
    comm.barrier(kInfo);
  });

  ASSERT_THAT(failures, SizeIs(3));
  EXPECT_THAT(failures, Each(std::string("rank 1 gives up")));
}

TEST(ThreadWorld, DeadlineNamesTheMissingRankOnEveryWaitingRank) {
  ThreadWorld world(3);
  world.set_deadline(std::chrono::steady_clock::now() + 200ms);
  std::atomic<int> num_timeouts = 0;

  world.run([&](Communicator& comm) {
    if (comm.rank() == 1) return;
    try {
      reduce(comm, 1024);
    } catch (const TimeoutError& error) {
      ++num_timeouts;
      EXPECT_THAT(error.what(), HasSubstr("rank 1 has not entered all_reduce #1 (grad_reduce, dp, sum, fp32 x 1024); "
                                          "ranks 0, 2 wait in it; rank 1 is before its first collective"));
    }
  });

  EXPECT_EQ(num_timeouts, 2);
}

TEST(ThreadWorld, RanksThatWaitForEachOtherInDifferentGroupsAreToldWithoutADeadline) {
  ThreadWorld world(4);

  const auto failures = failures_of(world, [](Communicator& comm) {
    const auto pair = comm.split(comm.rank() / 2, 0);
    ASSERT_EQ(pair->size(), 2);
    comm.rank() == 3 ? pair->barrier({Purpose::kClipNorm, Axis::kTp}) : comm.barrier(kInfo);
  });

  ASSERT_THAT(failures, SizeIs(4));
  EXPECT_THAT(failures, Each(AllOf(HasSubstr("deadlock"), HasSubstr("barrier #1 (clip_norm, tp)"))));
}

TEST(ThreadWorld, SplitOrdersByKeyLeavesGroupsOfOneAndNests) {
  ThreadWorld world(5);

  world.run([](Communicator& comm) {
    ASSERT_EQ(comm.size(), 5);
    // Ranks 0, 2, 4 in reverse order; 1 and 3 alone.
    const auto group = comm.split(comm.rank() % 2 == 0 ? 7 : -comm.rank(), -comm.rank());
    if (comm.rank() % 2 == 1) {
      EXPECT_EQ(group->size(), 1);
      EXPECT_EQ(group->world_rank_of(0), comm.rank());
      std::vector<float> values = {3.0F};
      group->all_reduce(buffer_of(values), Reduction::kSum, kInfo).wait();
      EXPECT_EQ(values[0], 3.0F);
      EXPECT_EQ(group->split(0, 0)->size(), 1);
      return;
    }
    ASSERT_EQ(group->size(), 3);
    EXPECT_EQ(group->rank(), (4 - comm.rank()) / 2);
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(group->world_rank_of(rank), 4 - 2 * rank);
    const auto nested = group->split(group->rank() == 1 ? 1 : 0, group->rank());
    EXPECT_EQ(nested->size(), group->rank() == 1 ? 1 : 2);
    std::vector<float> values = {static_cast<float>(comm.rank())};
    nested->all_reduce(buffer_of(values), Reduction::kSum, kInfo).wait();
    EXPECT_EQ(values[0], group->rank() == 1 ? 2.0F : 4.0F);
    EXPECT_THROW((void)nested->world_rank_of(5), CommError);
  });
}

TEST(ThreadWorld, TooManyGroupsAreAnErrorThatSaysSo) {
  ThreadWorld world(2);

  EXPECT_THROW(world.run([](Communicator& comm) {
    for (int group = 0; group < 1000; ++group) (void)comm.split(0, 0);
  }),
               Error);
  EXPECT_THROW(ThreadWorld(0), UsageError);
  EXPECT_THROW(ThreadWorld(17), UsageError);
}

}  // namespace
}  // namespace isoshard
