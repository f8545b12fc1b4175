// SPDX-License-Identifier: Apache-2.0
/// Worlds of more ranks than share memory: every operation is exact on integers, groups of rows and
/// columns add what is theirs, and one missing rank of many is named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "suite/testing/mpi_test_world.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr CallInfo kInfo{Purpose::kGradReduce, Axis::kDp};

using Numbers = std::vector<std::int64_t>;

Buffer buffer_of(Numbers& values) {
  return {reinterpret_cast<std::byte*>(values.data()), static_cast<std::int64_t>(values.size()),
          Dtype::kInt64};
}

/// Another number for each rank and place.
std::int64_t number(int rank, std::int64_t i) {
  return 1000 * rank + i % 997;
}

Numbers numbers_of(int rank, std::int64_t count) {
  Numbers values(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) values[static_cast<std::size_t>(i)] = number(rank, i);
  return values;
}

std::int64_t sum_of(int size, std::int64_t i) {
  return 1000 * (std::int64_t{size} * (size - 1) / 2) + size * (i % 997);
}

class ManyRanks : public testing::TestWithParam<ReductionOrder> {
 protected:
  ManyRanks() : size_(MpiTestWorld::attached_size()), world_(size_, GetParam()) {
    world_.set_deadline(Clock::now() + 120s);
  }
  int size_;
  MpiTestWorld world_;
};

TEST_P(ManyRanks, ReduceGatherScatterAndExchangeExactly) {
  world_.run([this](Communicator& comm) {
    for (const std::int64_t count : {std::int64_t{5}, std::int64_t{50'003}}) {
      Numbers all = numbers_of(comm.rank(), count);
      comm.all_reduce(buffer_of(all), Reduction::kSum, kInfo).wait();
      for (const std::int64_t i : {std::int64_t{0}, count / 2, count - 1})
        ASSERT_EQ(all[static_cast<std::size_t>(i)], sum_of(size_, i)) << "of " << count;
    }
    Numbers own = numbers_of(comm.rank(), 100), gathered(static_cast<std::size_t>(100 * size_));
    comm.all_gather(buffer_of(own), buffer_of(gathered), kInfo).wait();
    EXPECT_EQ(gathered[static_cast<std::size_t>(100 * (size_ - 1) + 7)], number(size_ - 1, 7));
    Numbers blocks = numbers_of(comm.rank(), 10 * size_), block(10);
    comm.reduce_scatter(buffer_of(blocks), buffer_of(block), Reduction::kSum, kInfo).wait();
    EXPECT_EQ(block[3], sum_of(size_, 10 * comm.rank() + 3));
    Numbers to_each = numbers_of(comm.rank(), size_), from_each(static_cast<std::size_t>(size_));
    comm.all_to_all(buffer_of(to_each), buffer_of(from_each), kInfo).wait();
    for (int rank = 0; rank < size_; ++rank)
      ASSERT_EQ(from_each[static_cast<std::size_t>(rank)], number(rank, comm.rank()));
    Numbers told = numbers_of(comm.rank(), 4);
    comm.broadcast(buffer_of(told), size_ - 1, kInfo).wait();
    EXPECT_EQ(told[2], number(size_ - 1, 2));
    Numbers sent = numbers_of(comm.rank(), 1000), received(1000);
    const std::vector<Transfer> shift = {
        {true, (comm.rank() + 1) % size_, buffer_of(sent), kInfo},
        {false, (comm.rank() + size_ - 1) % size_, buffer_of(received), kInfo}};
    comm.send_recv(shift).wait();
    EXPECT_EQ(received[999], number((comm.rank() + size_ - 1) % size_, 999));
  });
}

TEST_P(ManyRanks, RowsAndColumnsAreGroupsOfTheirOwn) {
  constexpr int kColumns = 4;
  world_.run([this](Communicator& comm) {
    const auto row = comm.split(comm.rank() / kColumns, comm.rank());
    const auto column = comm.split(comm.rank() % kColumns, -comm.rank());
    Numbers in_row = {comm.rank()}, in_column = {comm.rank()};
    row->all_reduce(buffer_of(in_row), Reduction::kSum, kInfo).wait();
    column->all_reduce(buffer_of(in_column), Reduction::kSum, kInfo).wait();

    std::int64_t sum_of_row = 0, sum_of_column = 0;
    for (int rank = 0; rank < size_; ++rank) {
      if (rank / kColumns == comm.rank() / kColumns) sum_of_row += rank;
      if (rank % kColumns == comm.rank() % kColumns) sum_of_column += rank;
    }
    EXPECT_EQ(in_row[0], sum_of_row);
    EXPECT_EQ(in_column[0], sum_of_column);
    EXPECT_EQ(column->world_rank_of(column->size() - 1), comm.rank() % kColumns);
  });
  EXPECT_GT(world_.journal().num_calls(MpiTestWorld::attached_rank()), 3U);
}

INSTANTIATE_TEST_SUITE_P(Orders, ManyRanks,
                         testing::Values(ReductionOrder::kOrdered, ReductionOrder::kRing,
                                         ReductionOrder::kTree, ReductionOrder::kNative),
                         [](const auto& order) { return std::string(name_of(order.param)); });

TEST(ManyRanksHang, OneMissingRankIsNamedByAllOthers) {
  const int size = MpiTestWorld::attached_size(), missing = size - 2;
  MpiTestWorld world(size);
  std::string failure;
  world.run([&](Communicator& comm) {
    comm.barrier(kInfo);  // all are there
    world.set_deadline(Clock::now() + 3s);
    if (comm.rank() == missing) return;
    try {
      comm.barrier(kInfo);
    } catch (const CommError& error) {
      failure = error.what();
    }
  });
  if (MpiTestWorld::attached_rank() == missing) return;
  EXPECT_THAT(failure, AllOf(HasSubstr("deadline passed"),
                             HasSubstr("rank " + std::to_string(missing) +
                                       " has not entered barrier #2 (grad_reduce, dp)")));
}

}  // namespace
}  // namespace isoshard
