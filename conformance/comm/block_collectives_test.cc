// SPDX-License-Identifier: Apache-2.0
/// Blocks of uneven sizes, all_to_all and transfers between two ranks are exact in every dtype, on
/// 1 to 5 ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <random>
#include <vector>

#include "core/comm/region/region.h"
#include "suite/testing/test_world.h"
#include "suite/testing/typed_values.h"

namespace isoshard {
namespace {

constexpr CallInfo kGather{Purpose::kParamGather, Axis::kDp};

/// Small integers that tell sender, receiver and place apart; exact in every dtype, summed over
/// five ranks too.
int value_of(Dtype dtype, int from, int to, std::int64_t i) {
  const auto value = static_cast<int>((from * 7 + to * 3 + i * 5) % 23);
  return dtype == Dtype::kBool ? value % 2 : value;
}

/// Elements from one rank to another. `scale` decides which are empty, odd, or larger than a
/// window's buffer.
std::int64_t count_of(std::int64_t scale, int from, int to) {
  if ((from + 2 * to) % 4 == 3) return 0;
  return scale == 0 ? 0 : scale * (1 + (from + to) % 2) + from + 2 * to;
}

std::vector<std::int64_t> scales_of(Dtype dtype) {
  const auto window = static_cast<std::int64_t>(kBufferBytes / size_of(dtype));
  std::vector<std::int64_t> scales = {0, 1, 301};
  // up to twice that: more than one round
  if (size_of(dtype) >= 4) scales.push_back(window / 2 + 1);
  return scales;
}

std::vector<std::int64_t> counts_of_blocks(std::int64_t scale, int num_ranks) {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < num_ranks; ++rank) counts.push_back(count_of(scale, rank, rank));
  return counts;
}

std::int64_t sum_of(const std::vector<std::int64_t>& counts) {
  std::int64_t sum = 0;
  for (const std::int64_t count : counts) sum += count;
  return sum;
}

class BlockCollectives : public testing::TestWithParam<int> {
 protected:
  BlockCollectives() {
    world_.set_deadline(std::chrono::steady_clock::now() + std::chrono::seconds(60));
  }

  void SetUp() override { ISOSHARD_SKIP_UNLESS_WORLD_OF(GetParam()); }

  /// Runs body on every rank for every dtype and scale, and returns how often.
  std::uint64_t for_all(const std::function<void(Communicator&, Dtype, std::int64_t)>& body) {
    std::uint64_t num_cases = 0;
    for (const Dtype dtype : kAllDtypes) {
      for (const std::int64_t scale : scales_of(dtype)) {
        ++num_cases;
        world_.run([&](Communicator& comm) {
          ASSERT_EQ(comm.size(), GetParam());
          SCOPED_TRACE(fmt::format("{}, scale {}, rank {} of {}", name_of(dtype), scale,
                                   comm.rank(), comm.size()));
          body(comm, dtype, scale);
        });
      }
    }
    return num_cases;
  }
  void expect_calls(CollectiveOp op, std::uint64_t calls) const {
    for (int rank = 0; rank < GetParam(); ++rank)
      EXPECT_EQ(world_.journal().num_calls(rank, op, Purpose::kParamGather), calls);
  }

  TestWorld world_{GetParam()};
};

TEST_P(BlockCollectives, UnevenAllGatherHoldsTheBlocksInRankOrder) {
  const std::uint64_t num_calls = for_all([](Communicator& comm, Dtype dtype, std::int64_t scale) {
    const auto counts = counts_of_blocks(scale, comm.size());
    const int rank = comm.rank();
    TypedValues input(dtype, counts[static_cast<std::size_t>(rank)],
                      [&](std::int64_t i) { return value_of(dtype, rank, 0, i); });
    TypedValues output(dtype, sum_of(counts));

    comm.all_gather_uneven(input.buffer(), output.buffer(), counts, kGather).wait();

    std::int64_t begin = 0;
    for (int from = 0; from < comm.size(); ++from) {
      const std::int64_t count = counts[static_cast<std::size_t>(from)];
      for (std::int64_t i = 0; i < count; ++i)
        ASSERT_EQ(output.get(begin + i), value_of(dtype, from, 0, i)) << "block " << from;
      begin += count;
    }
  });
  expect_calls(CollectiveOp::kAllGatherUneven, num_calls);
}

TEST_P(BlockCollectives, UnevenReduceScatterGivesEachRankItsReducedBlock) {
  const std::uint64_t num_calls = for_all([](Communicator& comm, Dtype dtype, std::int64_t scale) {
    const auto counts = counts_of_blocks(scale, comm.size());
    const auto value = [&](int rank, std::int64_t i) { return value_of(dtype, rank, 1, i); };
    TypedValues input(dtype, sum_of(counts), [&](std::int64_t i) { return value(comm.rank(), i); });
    TypedValues output(dtype, counts[static_cast<std::size_t>(comm.rank())]);
    std::int64_t begin = 0;
    for (int before = 0; before < comm.rank(); ++before)
      begin += counts[static_cast<std::size_t>(before)];

    comm.reduce_scatter_uneven(input.buffer(), output.buffer(), counts, Reduction::kSum, kGather)
        .wait();

    const auto expected = [&](std::int64_t i) {
      int sum = 0;
      for (int rank = 0; rank < comm.size(); ++rank) sum += value(rank, begin + i);
      return dtype == Dtype::kBool ? std::min(sum, 1) : sum;
    };
    EXPECT_EQ(output.first_other_than(expected), -1);
  });
  expect_calls(CollectiveOp::kReduceScatterUneven, num_calls);
}

TEST_P(BlockCollectives, AllToAllGivesEachRankWhatIsMeantForIt) {
  const std::uint64_t num_calls = for_all([](Communicator& comm, Dtype dtype, std::int64_t scale) {
    std::vector<std::int64_t> to_counts;
    std::vector<std::int64_t> from_counts;
    for (int peer = 0; peer < comm.size(); ++peer) {
      to_counts.push_back(count_of(scale, comm.rank(), peer));
      from_counts.push_back(count_of(scale, peer, comm.rank()));
    }
    TypedValues input(dtype, sum_of(to_counts));
    TypedValues output(dtype, sum_of(from_counts));
    std::int64_t place = 0;
    for (int to = 0; to < comm.size(); ++to) {
      for (std::int64_t i = 0; i < to_counts[static_cast<std::size_t>(to)]; ++i)
        input.set(place++, value_of(dtype, comm.rank(), to, i));
    }

    comm.all_to_all(input.buffer(), to_counts, output.buffer(), from_counts, kGather).wait();

    place = 0;
    for (int from = 0; from < comm.size(); ++from) {
      for (std::int64_t i = 0; i < from_counts[static_cast<std::size_t>(from)]; ++i) {
        ASSERT_EQ(output.get(place++), value_of(dtype, from, comm.rank(), i))
            << "from " << from << ", element " << i;
      }
    }
  });
  expect_calls(CollectiveOp::kAllToAll, num_calls);
}

TEST_P(BlockCollectives, AllToAllOfEqualBlocksTransposesThem) {
  world_.run([](Communicator& comm) {
    constexpr std::int64_t kBlock = 3;
    TypedValues input(Dtype::kInt32, kBlock * comm.size(),
                      [&](std::int64_t i) { return 100 * comm.rank() + static_cast<int>(i); });
    TypedValues output(Dtype::kInt32, kBlock * comm.size());

    comm.all_to_all(input.buffer(), output.buffer(), kGather).wait();

    const auto expected = [&](std::int64_t i) {
      return static_cast<int>(100 * (i / kBlock) + comm.rank() * kBlock + i % kBlock);
    };
    EXPECT_EQ(output.first_other_than(expected), -1);
  });
}

// Every rank sends to all and receives from all, itself too; the order of the list is another on
// every rank.
TEST_P(BlockCollectives, GroupedTransfersAllArrive) {
  const std::uint64_t num_calls = for_all([](Communicator& comm, Dtype dtype, std::int64_t scale) {
    const int rank = comm.rank();
    std::vector<TypedValues> sent;
    std::vector<TypedValues> received;
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < comm.size(); ++peer) {
      sent.emplace_back(dtype, count_of(scale, rank, peer),
                        [&](std::int64_t i) { return value_of(dtype, rank, peer, i); });
      received.emplace_back(dtype, count_of(scale, peer, rank));
      transfers.push_back({true, peer, sent.back().buffer(), kGather});
      transfers.push_back({false, peer, received.back().buffer(), kGather});
    }
    std::mt19937 engine(static_cast<unsigned>(rank));
    std::shuffle(transfers.begin(), transfers.end(), engine);

    comm.send_recv(transfers).wait();

    for (int peer = 0; peer < comm.size(); ++peer) {
      const auto expected = [&](std::int64_t i) { return value_of(dtype, peer, rank, i); };
      EXPECT_EQ(received[static_cast<std::size_t>(peer)].first_other_than(expected), -1)
          << "from " << peer;
    }
  });
  expect_calls(CollectiveOp::kSend, num_calls * static_cast<std::uint64_t>(GetParam() - 1));
  expect_calls(CollectiveOp::kRecv, num_calls * static_cast<std::uint64_t>(GetParam() - 1));
}

// As a pipeline does: each rank adds one to what it gets and hands it on; twice, so that messages
// of one pair follow each other.
TEST_P(BlockCollectives, SendAndRecvPassValuesAlongAPipeline) {
  for_all([](Communicator& comm, Dtype dtype, std::int64_t scale) {
    if (dtype == Dtype::kBool) return;
    for (int message = 0; message < 2; ++message) {
      const auto value = [&](int stage) {
        return [=](std::int64_t i) { return static_cast<int>((i + message) % 23) + stage; };
      };
      TypedValues data(dtype, scale * (message + 1), value(0));
      if (comm.rank() > 0) {
        data = TypedValues(dtype, scale * (message + 1));
        comm.recv(data.buffer(), comm.rank() - 1, kGather).wait();
        ASSERT_EQ(data.first_other_than(value(comm.rank() - 1)), -1) << "message " << message;
      }
      TypedValues next(dtype, scale * (message + 1), value(comm.rank()));
      if (comm.rank() + 1 < comm.size()) comm.send(next.buffer(), comm.rank() + 1, kGather).wait();
    }
  });
}

// Buffers of groups and of pairs are reused between calls of all kinds: nothing may read or write
// too early.
TEST_P(BlockCollectives, TransfersBetweenCollectivesDisturbNeither) {
  world_.run([](Communicator& comm) {
    std::mt19937 engine(3);  // the same choices on every rank
    const int right = (comm.rank() + 1) % comm.size();
    const int left = (comm.rank() + comm.size() - 1) % comm.size();
    for (int call = 0; call < 60; ++call) {
      const auto count = static_cast<std::int64_t>(engine() % (call % 6 == 0 ? 300'000 : 3'000));
      const auto mine = [&](int rank) {
        return [=](std::int64_t i) { return static_cast<int>((i + rank * 5 + call) % 101); };
      };
      TypedValues sent(Dtype::kInt32, count, mine(comm.rank()));
      TypedValues received(Dtype::kInt32, count);
      const std::vector<Transfer> shift = {{true, right, sent.buffer(), kGather},
                                           {false, left, received.buffer(), kGather}};
      comm.send_recv(shift).wait();
      ASSERT_EQ(received.first_other_than(mine(left)), -1) << "call " << call;
      comm.all_reduce(sent.buffer(), Reduction::kMax, kGather).wait();
      const auto most = [&](std::int64_t i) {
        int value = 0;
        for (int rank = 0; rank < comm.size(); ++rank) value = std::max(value, mine(rank)(i));
        return value;
      };
      ASSERT_EQ(sent.first_other_than(most), -1) << "call " << call;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, BlockCollectives, testing::Values(1, 2, 3, 4, 5),
                         [](const auto& ranks) { return fmt::format("n{}", ranks.param); });

}  // namespace
}  // namespace isoshard
