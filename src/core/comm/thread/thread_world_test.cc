// SPDX-License-Identifier: Apache-2.0
/// How a world of threads ends: mismatches, aborts, deadlines, deadlocks; and that groups are what
/// split promises.
#include "core/comm/thread/thread_world.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <mutex>
#include <numeric>
#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::SizeIs;
using namespace std::chrono_literals;

constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kDp};

Buffer buffer_of(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()),
          Dtype::kFloat32};
}

/// Runs body on every rank and returns what each rank's CommError said.
std::vector<std::string> failures_of(ThreadWorld& world,
                                     const std::function<void(Communicator&)>& body) {
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

TEST(ThreadWorld, HasNoCommunicatorOfARankThatItLacks) {
  ThreadWorld world(2);

  EXPECT_THROW((void)world.communicator(-1), UsageError);
  EXPECT_THROW((void)world.communicator(2), UsageError);
  EXPECT_EQ(world.communicator(1)->rank(), 1);
}

TEST(ThreadWorld, RefusesBuffersThatAreNotInHostMemory) {
  ThreadWorld world(1);
  std::vector<float> values(2);
  Buffer on_gpu = buffer_of(values), on_stream = on_gpu;
  on_gpu.device = {Device::Kind::kCuda, 1};
  on_stream.stream = &values;

  world.run([&](Communicator& comm) {
    EXPECT_THAT([&] { comm.all_reduce(on_gpu, Reduction::kSum, kInfo).wait(); },
                testing::ThrowsMessage<UsageError>(
                    HasSubstr("data must be in host memory and on no stream, got cuda:1")));
    EXPECT_THAT([&] { comm.send(on_stream, 0, kInfo).wait(); },
                testing::ThrowsMessage<UsageError>(HasSubstr("got cpu on a stream")));
  });
}

TEST(ThreadWorld, IsATransport) {
  const Transport transport = thread_transport();

  const std::unique_ptr<CommWorld> world = transport.make(1, ReductionOrder::kRing);

  EXPECT_EQ(transport.backend, Backend::kThread);
  EXPECT_FALSE(transport.crosses_processes);
  EXPECT_EQ(world->size(), 1);
  EXPECT_EQ(world->communicator(0)->reduction_order(), ReductionOrder::kRing);
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
    EXPECT_THAT(failures,
                Each(AllOf(HasSubstr("collectives differ"),
                           HasSubstr(fmt::format("rank 0 called {}", GetParam().first)),
                           HasSubstr(fmt::format("rank 1 called {}", GetParam().second)))));
    EXPECT_TRUE(world.is_aborted());
    EXPECT_THROW(world.run([](Communicator&) {}), CommError);
  }
}

void reduce(Communicator& comm, std::size_t count, Reduction reduction = Reduction::kSum,
            Purpose purpose = Purpose::kGradReduce) {
  std::vector<float> values(count);
  comm.all_reduce(buffer_of(values), reduction, {purpose, Axis::kDp}).wait();
}

void reduce_doubles(Communicator& comm) {
  std::vector<double> values(8);
  comm.all_reduce({reinterpret_cast<std::byte*>(values.data()), 8, Dtype::kFloat64},
                  Reduction::kSum, kInfo)
      .wait();
}

const std::array kMismatches = {
    Mismatch{"Op", [](Communicator& c) { c.rank() == 1 ? c.barrier(kInfo) : reduce(c, 8); },
             "all_reduce #1", "barrier #1"},
    Mismatch{"Dtype", [](Communicator& c) { c.rank() == 1 ? reduce_doubles(c) : reduce(c, 8); },
             "all_reduce #1 (grad_reduce, dp, sum, fp32 x 8)",
             "all_reduce #1 (grad_reduce, dp, sum, fp64 x 8)"},
    Mismatch{"Count", [](Communicator& c) { reduce(c, c.rank() == 1 ? 9 : 8); },
             "all_reduce #1 (grad_reduce, dp, sum, fp32 x 8)",
             "all_reduce #1 (grad_reduce, dp, sum, fp32 x 9)"},
    Mismatch{"CountAcrossPaths", [](Communicator& c) { reduce(c, c.rank() == 1 ? 1000000 : 8); },
             "all_reduce #1", "all_reduce #1"},
    Mismatch{
        "Reduction",
        [](Communicator& c) { reduce(c, 8, c.rank() == 1 ? Reduction::kMax : Reduction::kSum); },
        "all_reduce #1 (grad_reduce, dp, sum, fp32 x 8)",
        "all_reduce #1 (grad_reduce, dp, max, fp32 x 8)"},
    Mismatch{"Purpose",
             [](Communicator& c) {
               reduce(c, 8, Reduction::kSum,
                      c.rank() == 1 ? Purpose::kClipNorm : Purpose::kGradReduce);
             },
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
             "all_reduce #4 (grad_reduce, dp, sum, fp32 x 100000)",
             "all_reduce #4 (grad_reduce, dp, sum, fp32 x 100001)"}};

INSTANTIATE_TEST_SUITE_P(Thread, MismatchedCalls, testing::ValuesIn(kMismatches),
                         [](const auto& mismatch) { return std::string(mismatch.param.name); });

void gather_uneven(Communicator& comm, std::vector<std::int64_t> counts) {
  counts.resize(static_cast<std::size_t>(comm.size()), 2);
  std::vector<float> input(static_cast<std::size_t>(counts[static_cast<std::size_t>(comm.rank())]));
  std::vector<float> output(
      static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})));
  comm.all_gather_uneven(buffer_of(input), buffer_of(output), counts, kInfo).wait();
}

TEST(MismatchedCounts, OfUnevenBlocksAreNamedOnEveryRank) {
  for (const int num_ranks : {2, 3}) {
    ThreadWorld world(num_ranks);

    const auto failures = failures_of(world, [](Communicator& comm) {
      gather_uneven(comm, comm.rank() == 1 ? std::vector<std::int64_t>{3, 1}
                                           : std::vector<std::int64_t>{1, 3});
    });

    ASSERT_THAT(failures, SizeIs(num_ranks));
    EXPECT_THAT(failures,
                Each(AllOf(HasSubstr("rank 0 called all_gather_uneven #1"),
                           HasSubstr("with counts [1, 3"), HasSubstr("rank 1 with counts [3, 1"))));
  }
}

TEST(MismatchedCounts, OfAllToAllNameSenderAndReceiver) {
  ThreadWorld world(3);

  const auto failures = failures_of(world, [](Communicator& comm) {
    const std::vector<std::int64_t> sent = {1, 1, comm.rank() == 0 ? 4 : 1};
    const std::vector<std::int64_t> expected(3, 1);  // rank 2 does not expect the 4 of rank 0
    std::vector<float> input(static_cast<std::size_t>(sent[0] + sent[1] + sent[2]));
    std::vector<float> output(3);
    comm.all_to_all(buffer_of(input), sent, buffer_of(output), expected, kInfo).wait();
  });

  ASSERT_THAT(failures, SizeIs(3));
  EXPECT_THAT(failures,
              Each(HasSubstr("rank 0 has 4 elements for rank 2, which expects 1 from it")));
}

TEST(MismatchedTransfers, OfAnotherCountOrDtypeAreNamedOnBothSides) {
  for (const bool is_dtype : {false, true}) {
    ThreadWorld world(3);

    const auto failures = failures_of(world, [&](Communicator& comm) {
      std::vector<float> values(8);
      std::vector<double> doubles(8);
      const Buffer other =
          is_dtype ? Buffer{reinterpret_cast<std::byte*>(doubles.data()), 8, Dtype::kFloat64}
                   : Buffer{buffer_of(values).data, 7, Dtype::kFloat32};
      if (comm.rank() == 0) comm.send(buffer_of(values), 2, kInfo).wait();
      if (comm.rank() == 2) comm.recv(other, 0, kInfo).wait();
    });

    ASSERT_THAT(failures, SizeIs(2));
    EXPECT_THAT(
        failures,
        Each(AllOf(
            HasSubstr("transfers differ"),
            HasSubstr("rank 0 called send #1 (grad_reduce, dp, to rank 2, fp32 x 8)"),
            HasSubstr(is_dtype
                          ? "rank 2 called recv #1 (grad_reduce, dp, from rank 0, fp64 x 8)"
                          : "rank 2 called recv #1 (grad_reduce, dp, from rank 0, fp32 x 7)"))));
  }
}

TEST(MismatchedTransfers, TwoRanksThatSendToEachOtherAreTold) {
  ThreadWorld world(2);

  const auto failures = failures_of(world, [](Communicator& comm) {
    std::vector<float> values(8);
    comm.send(buffer_of(values), 1 - comm.rank(), kInfo).wait();
  });

  ASSERT_THAT(failures, SizeIs(2));
  EXPECT_THAT(failures,
              Each(AllOf(HasSubstr("deadlock"), HasSubstr("rank 0 waits for rank 1 in send #1"),
                         HasSubstr("rank 1 waits for rank 0 in send #1"))));
}

TEST(MismatchedTransfers, ACircleOfSendsIsADeadlockThatIsToldWithoutADeadline) {
  ThreadWorld world(3);

  const auto failures = failures_of(world, [](Communicator& comm) {
    std::vector<float> values(8);
    comm.send(buffer_of(values), (comm.rank() + 1) % 3, kInfo).wait();
  });

  ASSERT_THAT(failures, SizeIs(3));
  EXPECT_THAT(failures, Each(AllOf(HasSubstr("deadlock"),
                                   HasSubstr("send #1 (grad_reduce, dp, to rank 1, fp32 x 8)"))));
}

TEST(MismatchedTransfers, ASendThatNobodyReceivesIsNamedAtTheDeadline) {
  ThreadWorld world(3);
  world.set_deadline(std::chrono::steady_clock::now() + 200ms);

  EXPECT_THROW(world.run([](Communicator& comm) {
    std::vector<float> values(8);
    if (comm.rank() != 1) return;
    try {
      comm.send(buffer_of(values), 2, kInfo).wait();
    } catch (const TimeoutError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 2 has not entered send #1 (grad_reduce, dp, to "
                                          "rank 2, fp32 x 8); rank 1 waits in it"));
      throw;
    }
  }),
               TimeoutError);
}

TEST(MismatchedTransfers, PeersAndCountsThatCannotBeAreRefusedBeforeAnythingMoves) {
  ThreadWorld world(2);
  world.run([](Communicator& comm) {
    std::vector<float> values(4);
    const std::vector<std::int64_t> too_few = {4};
    const std::vector<std::int64_t> negative = {5, -1};
    const std::vector<Transfer> alone = {{true, comm.rank(), buffer_of(values), kInfo}};
    EXPECT_THROW(comm.send(buffer_of(values), comm.rank(), kInfo), CommError);
    EXPECT_THROW(comm.recv(buffer_of(values), 2, kInfo), CommError);
    EXPECT_THROW(comm.send_recv(alone), CommError);
    EXPECT_THROW(comm.all_gather_uneven(buffer_of(values), buffer_of(values), too_few, kInfo),
                 ShapeError);
    EXPECT_THROW(comm.reduce_scatter_uneven(buffer_of(values), buffer_of(values), negative,
                                            Reduction::kSum, kInfo),
                 ShapeError);
    comm.barrier(kInfo);  // the world still works
  });
  EXPECT_FALSE(world.is_aborted());
}

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
      EXPECT_THAT(
          error.what(),
          HasSubstr("rank 1 has not entered all_reduce #1 (grad_reduce, dp, sum, fp32 x 1024); "
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
  EXPECT_THAT(failures,
              Each(AllOf(HasSubstr("deadlock"), HasSubstr("barrier #1 (clip_norm, tp)"))));
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
