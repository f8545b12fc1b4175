// SPDX-License-Identifier: Apache-2.0
/// Every collective is exact on integers in every dtype and order: 1 to 5 ranks, odd and empty
/// sizes, sizes beyond a window.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <random>
#include <vector>

#include "conformance/comm/call_info.h"
#include "core/comm/region/region.h"
#include "suite/testing/test_world.h"
#include "suite/testing/typed_values.h"

namespace isoshard {
namespace {

/// Around every border inside the backend: none, one, fewer than ranks, a cache line, the small
/// path, one and two windows.
std::vector<std::int64_t> counts_of(Dtype dtype) {
  const auto window = static_cast<std::int64_t>(kBufferBytes / size_of(dtype));
  const auto small = static_cast<std::int64_t>((8U << 10) / size_of(dtype));
  std::vector<std::int64_t> counts = {0, 1, 3, 65, small, small + 1};
  if (size_of(dtype) >= 2 || dtype == Dtype::kInt8) counts.push_back(window + 1);
  if (size_of(dtype) >= 8) counts.insert(counts.end(), {window - 1, 2 * window + 3});
  return counts;
}

constexpr std::int64_t kPeriod = 23;
int value_of(int rank, std::int64_t i) {
  return static_cast<int>((i * 7 + rank * 11) % kPeriod);
}

/// Inputs of the ranks and their reduction, both repeating after kPeriod elements.
class Expected {
 public:
  Expected(Reduction reduction, int num_ranks, Dtype dtype)
      : inputs_(static_cast<std::size_t>(num_ranks)) {
    for (std::size_t i = 0; i < kPeriod; ++i) {
      int sum = 0;
      int least = 1000;
      int most = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        int value = value_of(rank, static_cast<std::int64_t>(i));
        if (dtype == Dtype::kBool) value = value % 3 == 0 ? 1 : 0;
        // The last rank completes the sum to a multiple of the ranks, so that the average is exact
        // too.
        if (reduction == Reduction::kAvg && rank == num_ranks - 1)
          value = (num_ranks - sum % num_ranks) % num_ranks;
        inputs_[static_cast<std::size_t>(rank)][i] = value;
        sum += value;
        least = std::min(least, value);
        most = std::max(most, value);
      }
      const int sum_in_dtype = dtype == Dtype::kBool ? std::min(sum, 1) : sum;
      reduced_[i] = reduction == Reduction::kMin   ? least
                    : reduction == Reduction::kMax ? most
                    : reduction == Reduction::kAvg ? sum / num_ranks
                                                   : sum_in_dtype;
    }
  }
  [[nodiscard]] const std::array<int, kPeriod>& reduced() const { return reduced_; }
  [[nodiscard]] const std::array<int, kPeriod>& input(int rank) const {
    return inputs_[static_cast<std::size_t>(rank)];
  }

 private:
  using Table = std::array<int, kPeriod>;
  std::vector<Table> inputs_;
  Table reduced_{};
};

/// A world of one size and order, and loops over every dtype and count.
class WorldUnderTest {
 public:
  WorldUnderTest(int num_ranks, ReductionOrder order)
      : num_ranks_(num_ranks), order_(order), world_(num_ranks, order) {
    // A rank that fails an ASSERT leaves the others waiting: let the deadline name it.
    world_.set_deadline(std::chrono::steady_clock::now() + std::chrono::seconds(60));
  }

  /// Runs body on every rank for every dtype and count, and returns how often.
  template <class Body>
  std::uint64_t for_all(const Body& body) {
    std::uint64_t num_cases = 0;
    for (const Dtype dtype : kAllDtypes) {
      for (const std::int64_t count : counts_of(dtype)) {
        ++num_cases;
        world_.run([&](Communicator& comm) {
          ASSERT_EQ(comm.size(), num_ranks_);
          ASSERT_EQ(comm.reduction_order(), order_);
          SCOPED_TRACE(fmt::format("{} x {}, rank {} of {}", name_of(dtype), count, comm.rank(),
                                   comm.size()));
          body(comm, dtype, count);
        });
      }
    }
    return num_cases;
  }
  void expect_calls(CollectiveOp op, std::uint64_t calls) const {
    for (int rank = 0; rank < num_ranks_; ++rank)
      EXPECT_EQ(world_.journal().num_calls(rank, op, Purpose::kGradReduce), calls);
  }
  void run(const std::function<void(Communicator&)>& body) { world_.run(body); }
  [[nodiscard]] const Journal& journal() const { return world_.journal(); }

 private:
  int num_ranks_;
  ReductionOrder order_;
  TestWorld world_;
};

class Collectives : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { ISOSHARD_SKIP_UNLESS_WORLD_OF(GetParam()); }
  WorldUnderTest world_{GetParam(), ReductionOrder::kOrdered};
};

struct SizeAndOrder {
  int num_ranks;
  ReductionOrder order;
};

class ReducingCollectives : public testing::TestWithParam<SizeAndOrder> {
 protected:
  void SetUp() override { ISOSHARD_SKIP_UNLESS_WORLD_OF(GetParam().num_ranks); }
  WorldUnderTest world_{GetParam().num_ranks, GetParam().order};
};

TEST_P(ReducingCollectives, AllReduceIsExact) {
  std::uint64_t num_calls = 0;
  for (const Reduction reduction :
       {Reduction::kSum, Reduction::kAvg, Reduction::kMin, Reduction::kMax}) {
    num_calls += world_.for_all([&](Communicator& comm, Dtype dtype, std::int64_t count) {
      if (dtype == Dtype::kBool && reduction == Reduction::kAvg) {
        // keeps the count of calls
        comm.all_reduce(TypedValues(Dtype::kUint8, 0).buffer(), Reduction::kSum, kInfo).wait();
        return;
      }
      const Expected expected(reduction, comm.size(), dtype);
      TypedValues data = TypedValues::repeating(dtype, count, expected.input(comm.rank()));

      comm.all_reduce(data.buffer(), reduction, kInfo).wait();

      EXPECT_EQ(data.first_other_than(TypedValues::repeating(dtype, count, expected.reduced())), -1)
          << name_of(reduction);
    });
  }
  world_.expect_calls(CollectiveOp::kAllReduce, num_calls);
}

TEST_P(ReducingCollectives, ReduceScatterGivesEachRankItsReducedBlock) {
  std::uint64_t num_calls = 0;
  for (const Reduction reduction : {Reduction::kSum, Reduction::kMax}) {
    num_calls += world_.for_all([&](Communicator& comm, Dtype dtype, std::int64_t count) {
      const Expected expected(reduction, comm.size(), dtype);
      const TypedValues given =
          TypedValues::repeating(dtype, count * comm.size(), expected.input(comm.rank()));
      TypedValues input = given, output(dtype, count);

      comm.reduce_scatter(input.buffer(), output.buffer(), reduction, kInfo).wait();

      EXPECT_EQ(output.first_other_than(
                    TypedValues::repeating(dtype, count, expected.reduced(), count * comm.rank())),
                -1);
      EXPECT_EQ(input.first_other_than(given), -1) << "input changed";
    });
  }
  world_.expect_calls(CollectiveOp::kReduceScatter, num_calls);
}

TEST_P(Collectives, AllGatherHoldsTheBlocksInRankOrder) {
  const std::uint64_t num_calls =
      world_.for_all([&](Communicator& comm, Dtype dtype, std::int64_t count) {
        const auto value = [&](int rank, std::int64_t i) {
          return value_of(rank, i) % (dtype == Dtype::kBool ? 2 : 100);
        };
        TypedValues input(dtype, count, [&](std::int64_t i) { return value(comm.rank(), i); });
        TypedValues output(dtype, count * comm.size());

        comm.all_gather(input.buffer(), output.buffer(), kInfo).wait();

        const auto expected = [&](std::int64_t i) {
          return value(static_cast<int>(i / count), i % count);
        };
        EXPECT_EQ(output.first_other_than(expected), -1);
      });
  world_.expect_calls(CollectiveOp::kAllGather, num_calls);
}

TEST_P(Collectives, BroadcastCopiesTheRootFromEveryRoot) {
  const std::uint64_t num_calls =
      world_.for_all([&](Communicator& comm, Dtype dtype, std::int64_t count) {
        for (int root = 0; root < comm.size(); ++root) {
          const auto value = [&](int rank, std::int64_t i) {
            return (value_of(rank, i) + root) % (dtype == Dtype::kBool ? 2 : 100);
          };
          TypedValues data(dtype, count, [&](std::int64_t i) { return value(comm.rank(), i); });

          comm.broadcast(data.buffer(), root, kInfo).wait();

          EXPECT_EQ(data.first_other_than([&](std::int64_t i) { return value(root, i); }), -1)
              << "root " << root;
        }
      });
  world_.expect_calls(CollectiveOp::kBroadcast, num_calls * static_cast<std::uint64_t>(GetParam()));
}

// Buffers of the windows are reused across calls of different kinds and sizes: nothing may read or
// write too early.
TEST_P(Collectives, AnySequenceOfCallsIsExact) {
  constexpr int kNumCalls = 300;
  world_.run([&](Communicator& comm) {
    std::mt19937 engine(20);  // the same choices on every rank
    for (int call = 0; call < kNumCalls; ++call) {
      const auto count = static_cast<std::int64_t>(engine() % (call % 8 == 0 ? 400'000 : 5'000));
      const auto op = engine() % 4;
      const auto root = static_cast<int>(engine() % static_cast<unsigned>(comm.size()));
      const auto mine = [&](int rank) {
        return [=](std::int64_t i) { return value_of(rank, i + call); };
      };
      TypedValues data(Dtype::kInt32, count, mine(comm.rank()));
      const Expected sum(Reduction::kSum, comm.size(), Dtype::kInt32);
      const auto summed = [&](std::int64_t i) {
        return sum.reduced()[static_cast<std::size_t>((i + call) % kPeriod)];
      };
      SCOPED_TRACE(fmt::format("call {}, op {}, count {}, rank {}", call, op, count, comm.rank()));
      if (op == 0) {
        comm.all_reduce(data.buffer(), Reduction::kSum, kInfo).wait();
        EXPECT_EQ(data.first_other_than(summed), -1);
      } else if (op == 1) {
        comm.broadcast(data.buffer(), root, kInfo).wait();
        EXPECT_EQ(data.first_other_than(mine(root)), -1);
      } else if (op == 2) {
        TypedValues all(Dtype::kInt32, count * comm.size());
        comm.all_gather(data.buffer(), all.buffer(), kInfo).wait();
        EXPECT_EQ(all.first_other_than(
                      [&](std::int64_t i) { return mine(static_cast<int>(i / count))(i % count); }),
                  -1);
      } else {
        TypedValues blocks(Dtype::kInt32, count * comm.size(), mine(comm.rank()));
        comm.reduce_scatter(blocks.buffer(), data.buffer(), Reduction::kSum, kInfo).wait();
        EXPECT_EQ(
            data.first_other_than([&](std::int64_t i) { return summed(i + count * comm.rank()); }),
            -1);
      }
    }
  });
  for (int rank = 0; rank < GetParam(); ++rank)
    EXPECT_EQ(world_.journal().num_calls(rank), static_cast<std::uint64_t>(kNumCalls));
}

std::vector<SizeAndOrder> sizes_and_orders() {
  std::vector<SizeAndOrder> result;
  for (const ReductionOrder order :
       {ReductionOrder::kOrdered, ReductionOrder::kRing, ReductionOrder::kTree}) {
    for (int num_ranks = 1; num_ranks <= 5; ++num_ranks) result.push_back({num_ranks, order});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, testing::Values(1, 2, 3, 4, 5),
                         [](const auto& ranks) { return fmt::format("n{}", ranks.param); });
INSTANTIATE_TEST_SUITE_P(Ranks, ReducingCollectives, testing::ValuesIn(sizes_and_orders()),
                         [](const auto& setting) {
                           return fmt::format("n{}_{}", setting.param.num_ranks,
                                              name_of(setting.param.order));
                         });

}  // namespace
}  // namespace isoshard
