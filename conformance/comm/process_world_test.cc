// SPDX-License-Identifier: Apache-2.0
/// Ranks that are processes and live for all tests, over MPI or NCCL: the bits of the shared-memory
/// backends, mismatches and hangs that are named on every process, and order native.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "conformance/comm/call_info.h"
#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"
#include "suite/testing/float_values.h"
#include "suite/testing/test_world.h"
#include "suite/testing/typed_values.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

Buffer floats_of(std::vector<float>& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()),
          Dtype::kFloat32};
}

/// What a rank's CommError says, empty if there was none. That of a passed deadline has a type of
/// its own.
std::string failure_of(TestWorld& world, const std::function<void(Communicator&)>& body) {
  std::string failure;
  bool is_timeout = false;
  world.run([&](Communicator& comm) {
    try {
      body(comm);
    } catch (const TimeoutError& error) {
      failure = error.what();
      is_timeout = true;
    } catch (const CommError& error) {
      failure = error.what();
    }
  });
  EXPECT_EQ(is_timeout, failure.starts_with("deadline passed")) << failure;
  return failure;
}

/// The bits of a rank's results after calls of all reducing operations.
template <class T>
std::vector<typename T::Bits> results_of(Communicator& comm) {
  std::vector<typename T::Bits> all;
  for (const std::int64_t count : {std::int64_t{3}, std::int64_t{1021}, std::int64_t{300'001}}) {
    const auto inputs = inputs_of<T>(comm.rank(), count);
    for (const Reduction reduction :
         {Reduction::kSum, Reduction::kAvg, Reduction::kMin, Reduction::kMax}) {
      auto data = inputs;
      comm.all_reduce(buffer_of<T>(data, 0, data.size()), reduction, kInfo).wait();
      all.insert(all.end(), data.begin(), data.end());
    }
    auto blocks = inputs_of<T>(comm.rank(), count * comm.size());
    Values<T> block(static_cast<std::size_t>(count));
    comm.reduce_scatter(buffer_of<T>(blocks, 0, blocks.size()),
                        buffer_of<T>(block, 0, block.size()), Reduction::kAvg, kInfo)
        .wait();
    all.insert(all.end(), block.begin(), block.end());
    std::vector<std::int64_t> counts;
    for (int rank = 0; rank < comm.size(); ++rank) counts.push_back(count + rank);
    counts.back() -= comm.size() * (comm.size() - 1) / 2;
    counts.back() = std::max<std::int64_t>(counts.back(), 0);
    std::int64_t total = 0;
    for (const std::int64_t one : counts) total += one;
    auto uneven = inputs_of<T>(comm.rank(), total);
    Values<T> own(static_cast<std::size_t>(counts[static_cast<std::size_t>(comm.rank())]));
    comm.reduce_scatter_uneven(buffer_of<T>(uneven, 0, uneven.size()),
                               buffer_of<T>(own, 0, own.size()), counts, Reduction::kSum, kInfo)
        .wait();
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

/// FNV-1a over the bit patterns.
template <class Bits>
std::uint64_t digest_of(const std::vector<Bits>& values) {
  std::uint64_t digest = 0xcbf29ce484222325U;
  for (const Bits& value : values) {
    std::uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    digest = (digest ^ word) * 0x100000001b3U;
  }
  return digest;
}

// A digest of values instead of bits would not see a last bit.
TEST(ProcessBitsDigest, SeesTheLastBitOfEveryDtype) {
  EXPECT_NE(digest_of<double>({0.5}), digest_of<double>({std::nextafter(0.5, 1)}));
  EXPECT_NE(digest_of<float>({0.5F}), digest_of<float>({std::nextafter(0.5F, 1.0F)}));
  EXPECT_NE(digest_of<std::uint16_t>({0x3f00}), digest_of<std::uint16_t>({0x3f01}));
}

class ProcessBits : public testing::TestWithParam<ReductionOrder> {};

TEST_P(ProcessBits, AreThoseOfThreadsInEveryOrder) {
  for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
    with_float_dtype(dtype, [&]<class T>() {
      const int size = TestWorld::attached_size();
      std::uint64_t digest_of_threads = 0, digest_of_processes = 1;
      ThreadWorld threads(size, GetParam());
      threads.run([&](Communicator& comm) {
        const std::uint64_t digest = digest_of(results_of<T>(comm));
        if (comm.rank() == TestWorld::attached_rank()) digest_of_threads = digest;
      });
      TestWorld world(size, GetParam());
      world.set_deadline(Clock::now() + 60s);
      world.run([&](Communicator& comm) { digest_of_processes = digest_of(results_of<T>(comm)); });

      EXPECT_EQ(digest_of_processes, digest_of_threads) << name_of(dtype);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, ProcessBits,
                         testing::Values(ReductionOrder::kOrdered, ReductionOrder::kRing,
                                         ReductionOrder::kTree),
                         [](const auto& order) { return std::string(name_of(order.param)); });

void reduce(Communicator& comm, std::size_t count, Reduction reduction = Reduction::kSum,
            Purpose purpose = Purpose::kGradReduce) {
  std::vector<float> values(count);
  comm.all_reduce(floats_of(values), reduction, {purpose, Axis::kDp}).wait();
}

struct Mismatch {
  const char* name;
  std::function<void(Communicator&)> body;  ///< rank 1's call differs
  const char* first;                        ///< what rank 0's call is called
  const char* second;
};

const std::array kMismatches = {
    Mismatch{"Op", [](Communicator& c) { c.rank() == 1 ? c.barrier(kInfo) : reduce(c, 8); },
             "all_reduce #1", "barrier #1"},
    Mismatch{"Dtype",
             [](Communicator& c) {
               TypedValues data(c.rank() == 1 ? Dtype::kFloat64 : Dtype::kFloat32, 8);
               c.all_reduce(data.buffer(), Reduction::kSum, kInfo).wait();
             },
             "fp32 x 8", "fp64 x 8"},
    Mismatch{"Count", [](Communicator& c) { reduce(c, c.rank() == 1 ? 1'000'000 : 8); }, "fp32 x 8",
             "fp32 x 1000000"},
    Mismatch{
        "Reduction",
        [](Communicator& c) { reduce(c, 8, c.rank() == 1 ? Reduction::kMax : Reduction::kSum); },
        "dp, sum", "dp, max"},
    Mismatch{"Root",
             [](Communicator& c) {
               std::vector<float> values(8);
               c.broadcast(floats_of(values), c.rank() == 1 ? 1 : 0, kInfo).wait();
             },
             "root 0", "root 1"}};

class ProcessMismatch : public testing::TestWithParam<Mismatch> {};

TEST_P(ProcessMismatch, IsNamedOnEveryRankWithoutADeadline) {
  const int size = TestWorld::attached_size();
  if (size == 1) GTEST_SKIP() << "one rank agrees with itself";
  Clock::duration best = 1h;  // others use the machine too
  for (int repetition = 0; repetition < 5; ++repetition) {
    TestWorld world(size);
    const auto start = Clock::now();
    const std::string failure = failure_of(world, GetParam().body);
    best = std::min(best, Clock::now() - start);
    EXPECT_THAT(failure, AllOf(HasSubstr("collectives differ"), HasSubstr("rank 0 called"),
                               HasSubstr(GetParam().first), HasSubstr("rank 1 called"),
                               HasSubstr(GetParam().second)));
    EXPECT_TRUE(world.is_aborted());
  }
  RecordProperty(
      "best_microseconds",
      static_cast<int>(std::chrono::duration_cast<std::chrono::microseconds>(best).count()));
}

INSTANTIATE_TEST_SUITE_P(Calls, ProcessMismatch, testing::ValuesIn(kMismatches),
                         [](const auto& mismatch) { return std::string(mismatch.param.name); });

TEST(ProcessMismatchedTransfers, AreNamedOnBothSidesAndReachTheOthers) {
  const int size = TestWorld::attached_size();
  if (size == 1) GTEST_SKIP() << "there is nobody to send to";
  for (const std::size_t count : {std::size_t{8}, std::size_t{500'000}}) {
    TestWorld world(size);
    world.set_deadline(Clock::now() + 60s);
    const std::string failure = failure_of(world, [&](Communicator& comm) {
      std::vector<float> values(count);
      if (comm.rank() == 0) comm.send(floats_of(values), 1, kInfo).wait();
      values.pop_back();
      if (comm.rank() == 1) comm.recv(floats_of(values), 0, kInfo).wait();
      comm.barrier(kInfo);
    });
    EXPECT_THAT(
        failure,
        AllOf(HasSubstr("transfers differ"),
              HasSubstr(fmt::format("rank 0 called send #1 (grad_reduce, dp, to rank 1, fp32 x {})",
                                    count)),
              HasSubstr(fmt::format(
                  "rank 1 called recv #1 (grad_reduce, dp, from rank 0, fp32 x {})", count - 1))));
  }
}

TEST(ProcessHang, ACircleOfSendsIsADeadlockThatIsToldWithoutADeadline) {
  const int size = TestWorld::attached_size();
  if (size == 1) GTEST_SKIP() << "one rank is no circle";
  TestWorld world(size);
  const std::string failure = failure_of(world, [size](Communicator& comm) {
    std::vector<float> values(8);
    comm.send(floats_of(values), (comm.rank() + 1) % size, kInfo).wait();
  });
  EXPECT_THAT(failure, AllOf(HasSubstr("deadlock"),
                             HasSubstr("rank 0 waits for rank 1 in send #1 (grad_reduce, dp, to "
                                       "rank 1, fp32 x 8)")));
}

TEST(ProcessHang, WaitsInDifferentGroupsAreADeadlockThatIsTold) {
  const int size = TestWorld::attached_size();
  if (size < 3) GTEST_SKIP() << "needs a group of some of the ranks";
  TestWorld world(size);
  const std::string failure = failure_of(world, [size](Communicator& comm) {
    const auto pair = comm.split(comm.rank() >= size - 2 ? 1 : 0, 0);
    comm.rank() == size - 1 ? pair->barrier({Purpose::kClipNorm, Axis::kTp}) : comm.barrier(kInfo);
  });
  EXPECT_THAT(failure, AllOf(HasSubstr("deadlock"), HasSubstr("barrier #1 (clip_norm, tp)")));
}

// Ranks that wait for a slow one are no circle, however often they tell each other that they wait.
TEST(ProcessHang, ASlowRankIsNoDeadlock) {
  const int size = TestWorld::attached_size();
  TestWorld world(size);
  world.set_deadline(Clock::now() + 60s);
  const std::string failure = failure_of(world, [size](Communicator& comm) {
    const auto half = comm.split(comm.rank() % 2, 0);
    for (int round = 0; round < 12; ++round) {
      const auto until = Clock::now() + 8ms;
      while (comm.rank() == round % size && Clock::now() < until) {
      }
      reduce(round % 2 == 0 ? comm : *half, 100);
      std::vector<float> sent(2000), received(2000);
      const std::vector<Transfer> shift = {
          {true, (comm.rank() + 1) % size, floats_of(sent), kInfo},
          {false, (comm.rank() + size - 1) % size, floats_of(received), kInfo}};
      comm.send_recv(shift).wait();
    }
  });
  EXPECT_EQ(failure, "");
}

TEST(ProcessHang, TheDeadlineNamesTheMissingRankOnEveryWaitingRank) {
  const int size = TestWorld::attached_size();
  if (size == 1) GTEST_SKIP() << "nobody waits";
  TestWorld world(size);
  world.set_deadline(Clock::now() + 300ms);
  const std::string failure = failure_of(world, [](Communicator& comm) {
    if (comm.rank() != 1) reduce(comm, 1024);
  });
  if (TestWorld::attached_rank() == 1) {
    EXPECT_EQ(failure, "");
    return;
  }
  EXPECT_THAT(failure,
              AllOf(HasSubstr("deadline passed: rank 1 has not entered all_reduce #1 (grad_reduce, "
                              "dp, sum, fp32 x 1024)"),
                    HasSubstr("rank 1 is before its first collective")));
}

TEST(ProcessWorld, AbortByARankReleasesBlockedRanksWithItsReason) {
  const int size = TestWorld::attached_size();
  TestWorld world(size);
  const std::string failure = failure_of(world, [size](Communicator& comm) {
    if (comm.rank() == size - 1) comm.abort("the last rank gives up");
    comm.barrier(kInfo);
  });
  EXPECT_EQ(failure, "the last rank gives up");
  EXPECT_TRUE(world.is_aborted());
}

TEST(ProcessWorld, TooManyGroupsAreAnErrorThatSaysSo) {
  const int size = TestWorld::attached_size();
  if (size == 1) GTEST_SKIP() << "groups of one need no room";
  TestWorld world(size);
  EXPECT_THROW(world.run([](Communicator& comm) {
    for (int group = 0; group < 1000; ++group) (void)comm.split(0, 0);
  }),
               Error);
}

TEST(ProcessWorld, SplitOrdersByKeyLeavesGroupsOfOneAndNests) {
  const int size = TestWorld::attached_size();
  TestWorld world(size);
  world.set_deadline(Clock::now() + 60s);
  world.run([size](Communicator& comm) {
    const auto group = comm.split(comm.rank() == 0 ? 1 : 0, -comm.rank());
    if (comm.rank() == 0) {
      EXPECT_EQ(group->size(), 1);
      reduce(*group, 100);
      EXPECT_EQ(group->split(0, 0)->size(), 1);
      return;
    }
    ASSERT_EQ(group->size(), size - 1);
    EXPECT_EQ(group->rank(), size - 1 - comm.rank());
    EXPECT_EQ(group->world_rank_of(0), size - 1);
    const auto nested = group->split(0, comm.rank());
    EXPECT_EQ(nested->world_rank_of(0), 1);
    std::vector<float> values = {1.0F};
    nested->all_reduce(floats_of(values), Reduction::kSum, kInfo).wait();
    EXPECT_EQ(values[0], static_cast<float>(size - 1));
    EXPECT_THROW((void)nested->world_rank_of(size), CommError);
  });
}

class ProcessNative : public testing::TestWithParam<Dtype> {};

TEST_P(ProcessNative, IsExactOnIntegersInEveryOperation) {
  const Dtype dtype = GetParam();
  const int size = TestWorld::attached_size();
  TestWorld world(size, ReductionOrder::kNative);
  world.set_deadline(Clock::now() + 60s);
  world.run([&](Communicator& comm) {
    ASSERT_EQ(comm.reduction_order(), ReductionOrder::kNative);
    const bool is_bool = dtype == Dtype::kBool;
    const auto value = [&](int rank, std::int64_t i) {
      return static_cast<int>((i + rank) % (is_bool ? 2 : 7));
    };
    for (const std::int64_t count : {std::int64_t{0}, std::int64_t{5}, std::int64_t{30'011}}) {
      TypedValues data(dtype, count, [&](std::int64_t i) { return value(comm.rank(), i); });
      comm.all_reduce(data.buffer(), Reduction::kSum, kInfo).wait();
      const auto sum = [&](std::int64_t i) {
        int total = 0;
        for (int rank = 0; rank < size; ++rank) total += value(rank, i);
        return is_bool ? std::min(total, 1) : total;
      };
      EXPECT_EQ(data.first_other_than(sum), -1) << "all_reduce x " << count;
      TypedValues blocks(dtype, count * size,
                         [&](std::int64_t i) { return value(comm.rank(), i); });
      TypedValues block(dtype, count);
      comm.reduce_scatter(blocks.buffer(), block.buffer(), Reduction::kMax, kInfo).wait();
      const auto most = [&](std::int64_t i) {
        int result = 0;
        for (int rank = 0; rank < size; ++rank)
          result = std::max(result, value(rank, i + count * comm.rank()));
        return result;
      };
      EXPECT_EQ(block.first_other_than(most), -1) << "reduce_scatter x " << count;
      if (is_bool) continue;
      TypedValues equal(dtype, count, [](std::int64_t i) { return static_cast<int>(i % 13); });
      comm.all_reduce(equal.buffer(), Reduction::kAvg, kInfo).wait();
      EXPECT_EQ(equal.first_other_than([](std::int64_t i) { return static_cast<int>(i % 13); }), -1)
          << "avg x " << count;
    }
    // groups have communicators of the library of their own
    const auto half = comm.split(comm.rank() % 2, comm.rank());
    TypedValues ones(dtype, 100, [](std::int64_t) { return 1; });
    half->all_reduce(ones.buffer(), Reduction::kSum, kInfo).wait();
    EXPECT_EQ(ones.first_other_than([&](std::int64_t) { return is_bool ? 1 : half->size(); }), -1);
  });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, ProcessNative, testing::ValuesIn(kAllDtypes),
                         [](const auto& dtype) { return std::string(name_of(dtype.param)); });

// Negative control of the main of these programs (CMakeLists.txt runs it): a test that fails on one
// rank fails on all, and the tests after it still run.
TEST(ProcessMain, DISABLED_FailsOnTheLastRankOnly) {
  TestWorld world(TestWorld::attached_size());
  world.run([](Communicator& comm) {
    comm.barrier(kInfo);
    EXPECT_NE(comm.rank(), comm.size() - 1) << "planted";
  });
}

}  // namespace
}  // namespace isoshard
