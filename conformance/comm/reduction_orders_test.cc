// SPDX-License-Identifier: Apache-2.0
/// `ring` and `tree` on ordinary floats: bit-equal to their formulas, and every order within its
/// analytic bound.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "conformance/comm/call_info.h"
#include "core/base/error.h"
#include "core/comm/thread/thread_world.h"
#include "suite/testing/float_values.h"
#include "suite/testing/test_world.h"

namespace isoshard {
namespace {

template <class T>
using AllInputs = std::vector<Values<T>>;

template <class T>
AllInputs<T> all_inputs_of(int num_ranks, std::int64_t count) {
  AllInputs<T> inputs;
  for (int rank = 0; rank < num_ranks; ++rank) inputs.push_back(inputs_of<T>(rank, count));
  return inputs;
}

/// One addition and one rounding to the dtype.
template <class T>
typename T::Bits rounded_sum(typename T::Bits left, typename T::Bits right) {
  volatile auto sum = T::widen(left) + T::widen(right);
  return T::narrow(sum);
}

template <class T>
typename T::Bits rounded_quotient(typename T::Bits sum, int num_ranks) {
  volatile auto quotient = T::widen(sum) / static_cast<decltype(T::widen({}))>(num_ranks);
  return T::narrow(quotient);
}

/// docs/internals/reduction.md, "ring": element i of chunk c starts on rank c + 1 and ends on rank
/// c.
template <class T>
typename T::Bits ring_sum(const AllInputs<T>& inputs, std::size_t i, std::size_t chunk) {
  const std::size_t n = inputs.size();
  typename T::Bits sum = inputs[(chunk + 1) % n][i];
  for (std::size_t hop = 2; hop <= n; ++hop)
    sum = rounded_sum<T>(sum, inputs[(chunk + hop) % n][i]);
  return sum;
}

/// docs/internals/reduction.md, "tree", written as the recursion that the levels are: the left part
/// is the largest power of two below n.
template <class T>
typename T::Bits tree_sum(const AllInputs<T>& inputs, std::size_t i, std::size_t first,
                          std::size_t size) {
  if (size == 1) return inputs[first][i];
  std::size_t left = 1;
  while (2 * left < size) left *= 2;
  return rounded_sum<T>(tree_sum<T>(inputs, i, first, left),
                        tree_sum<T>(inputs, i, first + left, size - left));
}

template <class T>
Values<T> model_of(ReductionOrder order, Reduction reduction, const AllInputs<T>& inputs) {
  const int num_ranks = static_cast<int>(inputs.size());
  const std::size_t count = inputs[0].size();
  const std::size_t chunk = (count + inputs.size() - 1) / inputs.size();
  Values<T> result(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto sum = order == ReductionOrder::kRing ? ring_sum<T>(inputs, i, i / chunk)
                                                    : tree_sum<T>(inputs, i, 0, inputs.size());
    result[i] = reduction == Reduction::kAvg ? rounded_quotient<T>(sum, num_ranks) : sum;
  }
  return result;
}

struct Setting {
  ReductionOrder order;
  Dtype dtype;
};

class ReductionOrders : public testing::TestWithParam<Setting> {};

// Sizes below, at and above the small path; chunks that begin inside slices; fewer elements than
// ranks.
TEST_P(ReductionOrders, AllReduceIsBitEqualToTheFormulaOnEveryRank) {
  with_float_dtype(GetParam().dtype, []<class T>() {
    for (const int num_ranks : {2, 3, 4, 5}) {
      if (!can_have_world_of(num_ranks)) continue;
      for (const std::int64_t count :
           {std::int64_t{1}, std::int64_t{7}, std::int64_t{1021}, kCount}) {
        const auto inputs = all_inputs_of<T>(num_ranks, count);
        TestWorld world(num_ranks, GetParam().order);
        for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg}) {
          const auto expected = model_of<T>(GetParam().order, reduction, inputs);
          world.run([&](Communicator& comm) {
            ASSERT_EQ(comm.size(), num_ranks);
            ASSERT_EQ(comm.reduction_order(), GetParam().order);
            auto data = inputs[static_cast<std::size_t>(comm.rank())];

            comm.all_reduce(buffer_of<T>(data, 0, data.size()), reduction, kInfo).wait();

            EXPECT_EQ((first_different_bit_pattern<T>(expected, data)), -1)
                << name_of(reduction) << " of " << num_ranks << " x " << count;
          });
        }
      }
    }
  });
}

TEST_P(ReductionOrders, ReduceScatterAddsEachBlockAsAllReduceDoes) {
  with_float_dtype(GetParam().dtype, []<class T>() {
    constexpr int kRanks = 3;
    if (!can_have_world_of(kRanks)) return;
    constexpr std::size_t kBlock = 100'003;
    const auto inputs = all_inputs_of<T>(kRanks, kRanks * kBlock);
    // blocks and chunks coincide
    const auto expected = model_of<T>(GetParam().order, Reduction::kAvg, inputs);
    TestWorld world(kRanks, GetParam().order);
    world.run([&](Communicator& comm) {
      ASSERT_EQ(comm.size(), kRanks);
      auto data = inputs[static_cast<std::size_t>(comm.rank())];
      Values<T> block(kBlock);

      comm.reduce_scatter(buffer_of<T>(data, 0, data.size()), buffer_of<T>(block, 0, kBlock),
                          Reduction::kAvg, kInfo)
          .wait();

      const auto begin = expected.begin() + comm.rank() * static_cast<std::ptrdiff_t>(kBlock);
      EXPECT_EQ((first_different_bit_pattern<T>({begin, begin + kBlock}, block)), -1);
    });
  });
}

TEST_P(ReductionOrders, AGroupOfASplitHasTheOrderOfItsWorld) {
  with_float_dtype(GetParam().dtype, []<class T>() {
    if (!can_have_world_of(4)) return;
    const auto of_world = all_inputs_of<T>(4, 10'001);
    const auto expected =
        model_of<T>(GetParam().order, Reduction::kSum, {of_world[3], of_world[1], of_world[2]});
    TestWorld world(4, GetParam().order);
    world.run([&](Communicator& comm) {
      const auto group = comm.split(comm.rank() == 0 ? 1 : 0, comm.rank() == 3 ? 0 : comm.rank());
      ASSERT_EQ(group->reduction_order(), GetParam().order);
      if (comm.rank() == 0) return;
      ASSERT_EQ(group->size(), 3);
      auto data = of_world[static_cast<std::size_t>(comm.rank())];

      group->all_reduce(buffer_of<T>(data, 0, data.size()), Reduction::kSum, kInfo).wait();

      EXPECT_EQ((first_different_bit_pattern<T>(expected, data)), -1);
    });
  });
}

// Negative control: were the inputs tame, an implementation that ignores the order would pass.
TEST_P(ReductionOrders, InputsTellTheOrdersApart) {
  with_float_dtype(GetParam().dtype, []<class T>() {
    if (!can_have_world_of(4)) return;
    const auto inputs = all_inputs_of<T>(4, 1021);
    const auto ring = model_of<T>(ReductionOrder::kRing, Reduction::kSum, inputs);
    const auto tree = model_of<T>(ReductionOrder::kTree, Reduction::kSum, inputs);
    TestWorld world(4);
    world.run([&](Communicator& comm) {
      auto ordered = inputs[static_cast<std::size_t>(comm.rank())];
      comm.all_reduce(buffer_of<T>(ordered, 0, ordered.size()), Reduction::kSum, kInfo).wait();
      EXPECT_NE((first_different_bit_pattern<T>(ordered, ring)), -1);
      EXPECT_NE((first_different_bit_pattern<T>(ordered, tree)), -1);
    });
    EXPECT_NE((first_different_bit_pattern<T>(ring, tree)), -1);
  });
}

std::vector<Setting> settings_of(std::vector<ReductionOrder> orders) {
  std::vector<Setting> settings;
  for (const ReductionOrder order : orders) {
    for (const Dtype dtype : {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16})
      settings.push_back({order, dtype});
  }
  return settings;
}

std::string slug_of(const testing::TestParamInfo<Setting>& setting) {
  return fmt::format("{}_{}", name_of(setting.param.order), name_of(setting.param.dtype));
}

INSTANTIATE_TEST_SUITE_P(
    Orders, ReductionOrders,
    testing::ValuesIn(settings_of({ReductionOrder::kRing, ReductionOrder::kTree})), slug_of);

class ReductionBound : public testing::TestWithParam<Setting> {};

/// u and the number of roundings on an element's longest way, docs/internals/tolerances.md, "Sums
/// over ranks".
double bound_factor(ReductionOrder order, Dtype dtype, int num_ranks, bool is_average) {
  const double u = unit_roundoff(dtype);
  const double u_accumulator =
      unit_roundoff(dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32);
  const auto gamma = [](int k, double unit) { return k * unit / (1 - k * unit); };
  const int division = is_average ? 1 : 0;
  if (order == ReductionOrder::kOrdered) {
    const double in_accumulator = gamma(num_ranks - 1 + division, u_accumulator);
    return in_accumulator + (u == u_accumulator ? 0 : u * (1 + in_accumulator));
  }
  const int hops = order == ReductionOrder::kTree
                       ? static_cast<int>(std::ceil(std::log2(num_ranks)))
                       : num_ranks - 1;
  return gamma(hops + division, u);
}

/// The largest |result - exact| / sum |x| over the elements, with the sums in long double.
template <class T>
double worst_ratio(const AllInputs<T>& inputs, const Values<T>& result, bool is_average) {
  const long double divisor = is_average ? static_cast<long double>(inputs.size()) : 1;
  long double worst = 0;
  for (std::size_t i = 0; i < result.size(); ++i) {
    long double exact = 0;
    long double magnitude = 0;
    for (const Values<T>& input : inputs) {
      exact += T::widen(input[i]);
      magnitude += std::fabs(static_cast<long double>(T::widen(input[i])));
    }
    worst =
        std::max(worst, std::fabs(T::widen(result[i]) - exact / divisor) / (magnitude / divisor));
  }
  return static_cast<double>(worst);
}

TEST_P(ReductionBound, OrdinaryFloatsStayWithinTheAnalyticBound) {
  with_float_dtype(GetParam().dtype, []<class T>() {
    for (const int num_ranks : {2, 3, 5}) {
      if (!can_have_world_of(num_ranks)) continue;
      const auto inputs = all_inputs_of<T>(num_ranks, 50'021);
      TestWorld world(num_ranks, GetParam().order);
      for (const Reduction reduction : {Reduction::kSum, Reduction::kAvg}) {
        const double bound = bound_factor(GetParam().order, GetParam().dtype, num_ranks,
                                          reduction == Reduction::kAvg);
        world.run([&](Communicator& comm) {
          auto data = inputs[static_cast<std::size_t>(comm.rank())];
          comm.all_reduce(buffer_of<T>(data, 0, data.size()), reduction, kInfo).wait();
          if (comm.rank() != 0) return;

          const double worst = worst_ratio<T>(inputs, data, reduction == Reduction::kAvg);

          EXPECT_LE(worst, bound) << name_of(reduction) << " of " << num_ranks;
          EXPECT_GT(worst, bound / 32)
              << "a bound that nothing comes near shows nothing: " << name_of(reduction) << " of "
              << num_ranks;
        });
      }
    }
  });
}

// Negative control: one rank's part lost in one element.
TEST_P(ReductionBound, ALostAddendIsOutsideTheBound) {
  with_float_dtype(GetParam().dtype, []<class T>() {
    constexpr int kRanks = 3;
    if (!can_have_world_of(kRanks)) return;
    const auto inputs = all_inputs_of<T>(kRanks, 1021);
    auto without = inputs;
    without[1][510] = T::narrow(0);
    TestWorld world(kRanks, GetParam().order);
    world.run([&](Communicator& comm) {
      auto data = without[static_cast<std::size_t>(comm.rank())];
      comm.all_reduce(buffer_of<T>(data, 0, data.size()), Reduction::kSum, kInfo).wait();

      EXPECT_GT(worst_ratio<T>(inputs, data, false),
                bound_factor(GetParam().order, GetParam().dtype, kRanks, false));
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Orders, ReductionBound,
                         testing::ValuesIn(settings_of({ReductionOrder::kOrdered,
                                                        ReductionOrder::kRing,
                                                        ReductionOrder::kTree})),
                         slug_of);

TEST(ReductionOrderNames, NativeIsRefusedByNameWhereNoLibraryIsBelow) {
  try {
    const ThreadWorld world(2, ReductionOrder::kNative);
    FAIL() << "a world with an order that it cannot have";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("reduction order native"), std::string::npos)
        << error.what();
  }
}

TEST(ReductionOrderNames, AreParsedAsTheyAreWritten) {
  for (const ReductionOrder order : {ReductionOrder::kOrdered, ReductionOrder::kRing,
                                     ReductionOrder::kTree, ReductionOrder::kNative}) {
    EXPECT_EQ(parse_reduction_order(name_of(order)), order);
  }
  EXPECT_THROW((void)parse_reduction_order("rings"), UsageError);
}

}  // namespace
}  // namespace isoshard
