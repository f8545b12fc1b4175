// SPDX-License-Identifier: Apache-2.0
/// Reductions of ordinary floats are bit-equal to the formula of docs/internals/reduction.md,
/// however the data are cut.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "conformance/comm/call_info.h"
#include "suite/testing/float_values.h"
#include "suite/testing/test_world.h"

namespace isoshard {
namespace {

/// The formula, one forced addition after the other, over world ranks in the given order.
template <class T>
Values<T> expected_of(const std::vector<int>& order, bool is_average) {
  using Accumulator = decltype(T::widen({}));
  std::vector<Accumulator> sums(static_cast<std::size_t>(kCount));
  for (std::size_t position = 0; position < order.size(); ++position) {
    const Values<T> input = inputs_of<T>(order[position]);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      volatile Accumulator sum = position == 0 ? T::widen(input[i]) : sums[i] + T::widen(input[i]);
      sums[i] = sum;
    }
  }
  Values<T> result(sums.size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    volatile Accumulator value =
        is_average ? sums[i] / static_cast<Accumulator>(order.size()) : sums[i];
    result[i] = T::narrow(value);
  }
  return result;
}

std::vector<int> ranks_up_to(int num_ranks) {
  std::vector<int> order;
  for (int rank = 0; rank < num_ranks; ++rank) order.push_back(rank);
  return order;
}

class OrderedReduction : public testing::TestWithParam<Dtype> {};

TEST_P(OrderedReduction, IsBitEqualToTheFormulaOnEveryRank) {
  with_float_dtype(GetParam(), []<class T>() {
    for (const int num_ranks : {2, 3, 5}) {
      if (!can_have_world_of(num_ranks)) continue;
      for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg}) {
        const auto expected = expected_of<T>(ranks_up_to(num_ranks), reduction == Reduction::kAvg);
        TestWorld world(num_ranks);
        world.run([&](Communicator& comm) {
          ASSERT_EQ(comm.size(), num_ranks);
          ASSERT_EQ(comm.reduction_order(), ReductionOrder::kOrdered);
          auto data = inputs_of<T>(comm.rank());

          comm.all_reduce(buffer_of<T>(data), reduction, kInfo).wait();

          EXPECT_EQ((first_different_bit_pattern<T>(expected, data)), -1)
              << name_of(reduction) << " of " << num_ranks;
        });
      }
    }
  });
}

TEST_P(OrderedReduction, BucketsOfAnySizeGiveTheSameBits) {
  with_float_dtype(GetParam(), []<class T>() {
    if (!can_have_world_of(3)) return;
    const auto expected = expected_of<T>(ranks_up_to(3), false);
    TestWorld world(3);
    world.run([&](Communicator& comm) {
      auto data = inputs_of<T>(comm.rank());
      std::mt19937 engine(5);
      for (std::size_t begin = 0; begin < data.size();) {
        const std::size_t count = std::min<std::size_t>(data.size() - begin, engine() % 20'000);
        comm.all_reduce(buffer_of<T>(data, begin, count), Reduction::kSum, kInfo).wait();
        begin += count;
      }
      EXPECT_EQ((first_different_bit_pattern<T>(expected, data)), -1);
    });
  });
}

TEST_P(OrderedReduction, ReduceScatterThenAllGatherIsAllReduce) {
  with_float_dtype(GetParam(), []<class T>() {
    if (!can_have_world_of(3)) return;
    TestWorld world(3);
    world.run([&](Communicator& comm) {
      constexpr std::size_t kBlock = 100'003;
      auto reference = inputs_of<T>(comm.rank(), 3 * kBlock);
      auto scattered = reference;
      Values<T> block(kBlock);

      comm.all_reduce(buffer_of<T>(reference, 0, 3 * kBlock), Reduction::kAvg, kInfo).wait();
      comm.reduce_scatter(buffer_of<T>(scattered, 0, 3 * kBlock), buffer_of<T>(block, 0, kBlock),
                          Reduction::kAvg, kInfo)
          .wait();
      comm.all_gather(buffer_of<T>(block, 0, kBlock), buffer_of<T>(scattered, 0, 3 * kBlock), kInfo)
          .wait();

      EXPECT_EQ((first_different_bit_pattern<T>(reference, scattered)), -1);
    });
  });
}

TEST_P(OrderedReduction, FollowsTheOrderOfTheGroupNotOfTheWorld) {
  with_float_dtype(GetParam(), []<class T>() {
    if (!can_have_world_of(4)) return;
    const auto expected = expected_of<T>({3, 1, 0, 2}, false);
    const auto in_world_order = expected_of<T>({0, 1, 2, 3}, false);
    TestWorld world(4);
    world.run([&](Communicator& comm) {
      constexpr int kKeys[] = {2, 1, 3, 0};
      const auto group = comm.split(0, kKeys[comm.rank()]);
      ASSERT_EQ(group->size(), 4);
      auto data = inputs_of<T>(comm.rank());

      group->all_reduce(buffer_of<T>(data), Reduction::kSum, kInfo).wait();

      EXPECT_EQ((first_different_bit_pattern<T>(expected, data)), -1);
    });
    EXPECT_NE((first_different_bit_pattern<T>(expected, in_world_order)), -1)
        << "inputs that cannot tell the orders apart";
  });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, OrderedReduction,
                         testing::Values(Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16,
                                         Dtype::kFloat16),
                         [](const auto& dtype) { return std::string(name_of(dtype.param)); });

}  // namespace
}  // namespace isoshard
