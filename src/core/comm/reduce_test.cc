// SPDX-License-Identifier: Apache-2.0
/// The ordered reduction against a scalar computation written from docs/internals/reduction.md.
#include "core/comm/reduce.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "core/base/error.h"
#include "core/base/float_bits.h"

namespace isoshard {
namespace {

constexpr std::array<std::int64_t, 7> kCounts = {0, 1, 3, 17, 1023, 1025, 5000};
constexpr int kMostSources = 5;

template <class T>
std::vector<T> reduced(Reduction reduction, Dtype dtype,
                       const std::vector<std::vector<T>>& inputs) {
  std::vector<const std::byte*> sources;
  for (const auto& input : inputs)
    sources.push_back(reinterpret_cast<const std::byte*>(input.data()));
  std::vector<T> output(inputs[0].size());
  reduce_ordered(reduction, dtype, sources, reinterpret_cast<std::byte*>(output.data()),
                 static_cast<std::int64_t>(output.size()));
  return output;
}

std::vector<std::vector<float>> ordinary_floats(int num_sources, std::int64_t count) {
  std::mt19937 engine(17);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> inputs(static_cast<std::size_t>(num_sources));
  for (auto& input : inputs) {
    input.resize(static_cast<std::size_t>(count));
    for (float& value : input) value = normal(engine);
  }
  return inputs;
}

// volatile keeps the compiler from doing anything but one rounded addition after the other.
float sum_in_order(const std::vector<std::vector<float>>& inputs, std::size_t i) {
  volatile float sum = inputs[0][i];
  for (std::size_t s = 1; s < inputs.size(); ++s) sum = sum + inputs[s][i];
  return sum;
}

TEST(ReduceOrdered, Fp32SumAndAvgAreBitEqualToAdditionsInRankOrder) {
  for (int num_sources = 1; num_sources <= kMostSources; ++num_sources) {
    for (const std::int64_t count : kCounts) {
      const auto inputs = ordinary_floats(num_sources, count);

      const auto sums = reduced(Reduction::kSum, Dtype::kFloat32, inputs);
      const auto averages = reduced(Reduction::kAvg, Dtype::kFloat32, inputs);

      for (std::size_t i = 0; i < sums.size(); ++i) {
        const float expected = sum_in_order(inputs, i);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(sums[i]), std::bit_cast<std::uint32_t>(expected))
            << num_sources << " sources, " << i;
        volatile float average = expected / static_cast<float>(num_sources);
        ASSERT_EQ(averages[i], average) << num_sources << " sources, element " << i;
      }
    }
  }
}

TEST(ReduceOrdered, SixteenBitFloatsAccumulateInFp32AndRoundOnce) {
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    const auto to_bits = dtype == Dtype::kBFloat16 ? float_to_bf16 : float_to_fp16;
    const auto to_float = dtype == Dtype::kBFloat16 ? bf16_to_float : fp16_to_float;
    const auto floats = ordinary_floats(3, 4001);
    std::vector<std::vector<std::uint16_t>> inputs(floats.size());
    std::vector<std::vector<float>> widened(floats.size());
    for (std::size_t s = 0; s < floats.size(); ++s) {
      for (const float value : floats[s]) {
        inputs[s].push_back(to_bits(value));
        widened[s].push_back(to_float(inputs[s].back()));
      }
    }

    const auto sums = reduced(Reduction::kSum, dtype, inputs);
    const auto averages = reduced(Reduction::kAvg, dtype, inputs);

    int differs_from_rounding_per_hop = 0;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const float exact = sum_in_order(widened, i);
      ASSERT_EQ(sums[i], to_bits(exact)) << name_of(dtype) << " element " << i;
      volatile float average = exact / 3.0F;
      ASSERT_EQ(averages[i], to_bits(average)) << name_of(dtype) << " element " << i;
      const float hop = to_float(to_bits(widened[0][i] + widened[1][i]));
      differs_from_rounding_per_hop += sums[i] != to_bits(hop + widened[2][i]) ? 1 : 0;
    }
    EXPECT_GT(differs_from_rounding_per_hop, 100)
        << "inputs that cannot tell one rounding from several";
  }
}

TEST(ReduceOrdered, OrderOfSourcesMatters) {
  const std::vector<std::vector<float>> inputs = {{1e8F}, {1.0F}, {-1e8F}};

  EXPECT_EQ(reduced(Reduction::kSum, Dtype::kFloat32, inputs)[0], 0.0F);
  EXPECT_EQ(reduced<float>(Reduction::kSum, Dtype::kFloat32, {inputs[0], inputs[2], inputs[1]})[0],
            1.0F);
  EXPECT_EQ(reduced<double>(Reduction::kSum, Dtype::kFloat64, {{1e8}, {1.0}, {-1e8}})[0], 1.0);
}

TEST(ReduceOrdered, MinAndMaxPropagateNanAndKeepTheFirstZero) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<std::vector<float>> inputs = {
      {1, nan, 1, -0.0F, 0.0F}, {2, 1, nan, 0.0F, -0.0F}, {0, 1, 1, 0.0F, 0.0F}};

  const auto least = reduced(Reduction::kMin, Dtype::kFloat32, inputs);
  const auto most = reduced(Reduction::kMax, Dtype::kFloat32, inputs);

  EXPECT_EQ(least[0], 0.0F);
  EXPECT_EQ(most[0], 2.0F);
  for (const auto& result : {least, most}) {
    EXPECT_TRUE(std::isnan(result[1]) && std::isnan(result[2]));
    EXPECT_TRUE(std::signbit(result[3]));
    EXPECT_FALSE(std::signbit(result[4]));
  }
}

TEST(ReduceOrdered, IntegersWrapAndAverageTowardsZero) {
  EXPECT_EQ(reduced<std::int8_t>(Reduction::kSum, Dtype::kInt8, {{100, -3}, {100, 1}}),
            (std::vector<std::int8_t>{-56, -2}));
  EXPECT_EQ(reduced<std::uint8_t>(Reduction::kSum, Dtype::kUint8, {{200}, {100}}),
            std::vector<std::uint8_t>{44});
  EXPECT_EQ(reduced<std::int16_t>(Reduction::kMin, Dtype::kInt16, {{5}, {-7}, {2}}),
            std::vector<std::int16_t>{-7});
  EXPECT_EQ(reduced<std::int32_t>(Reduction::kAvg, Dtype::kInt32, {{-7}, {0}}),
            std::vector<std::int32_t>{-3});
  const std::int64_t big = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(reduced<std::int64_t>(Reduction::kSum, Dtype::kInt64, {{big}, {1}}),
            std::vector<std::int64_t>{-big - 1});
}

TEST(ReduceOrdered, BoolsAreAnyAndAll) {
  const std::vector<std::vector<std::uint8_t>> inputs = {{0, 1, 0, 7}, {0, 1, 1, 2}};

  EXPECT_EQ(reduced(Reduction::kSum, Dtype::kBool, inputs),
            (std::vector<std::uint8_t>{0, 1, 1, 1}));
  EXPECT_EQ(reduced(Reduction::kMax, Dtype::kBool, inputs),
            (std::vector<std::uint8_t>{0, 1, 1, 1}));
  EXPECT_EQ(reduced(Reduction::kMin, Dtype::kBool, inputs),
            (std::vector<std::uint8_t>{0, 1, 0, 1}));
  EXPECT_THROW(reduced(Reduction::kAvg, Dtype::kBool, inputs), ShapeError);
}

TEST(ReduceOrdered, OutputMayBeASource) {
  auto inputs = ordinary_floats(4, 3001);
  const auto expected = reduced(Reduction::kSum, Dtype::kFloat32, inputs);
  std::vector<const std::byte*> sources;
  for (const auto& input : inputs)
    sources.push_back(reinterpret_cast<const std::byte*>(input.data()));

  reduce_ordered(Reduction::kSum, Dtype::kFloat32, sources,
                 reinterpret_cast<std::byte*>(inputs[2].data()), 3001);

  EXPECT_EQ(inputs[2], expected);
  EXPECT_THROW(reduce_ordered(Reduction::kSum, Dtype::kFloat32, {}, nullptr, 0), ShapeError);
}

using Reduce = void (*)(Reduction, Dtype, std::span<const std::byte* const>, std::byte*,
                        std::int64_t);

/// 16-bit inputs, and what `reduce` makes of them.
std::vector<std::uint16_t> reduced_bf16(Reduce reduce, Reduction reduction,
                                        const std::vector<std::vector<std::uint16_t>>& inputs) {
  std::vector<const std::byte*> sources;
  for (const auto& input : inputs)
    sources.push_back(reinterpret_cast<const std::byte*>(input.data()));
  std::vector<std::uint16_t> output(inputs[0].size());
  reduce(reduction, Dtype::kBFloat16, sources, reinterpret_cast<std::byte*>(output.data()),
         static_cast<std::int64_t>(output.size()));
  return output;
}

std::vector<std::vector<std::uint16_t>> as_bf16(const std::vector<std::vector<float>>& floats) {
  std::vector<std::vector<std::uint16_t>> inputs(floats.size());
  for (std::size_t s = 0; s < floats.size(); ++s) {
    for (const float value : floats[s]) inputs[s].push_back(float_to_bf16(value));
  }
  return inputs;
}

std::uint16_t bf16_sum(std::uint16_t left, std::uint16_t right) {
  volatile float sum = bf16_to_float(left) + bf16_to_float(right);
  return float_to_bf16(sum);
}

std::uint16_t bf16_quotient(std::uint16_t sum, std::size_t divisor) {
  volatile float quotient = bf16_to_float(sum) / static_cast<float>(divisor);
  return float_to_bf16(quotient);
}

TEST(ReduceInHops, RoundsAfterEveryAdditionAndDividesLast) {
  for (int num_sources = 1; num_sources <= kMostSources; ++num_sources) {
    for (const std::int64_t count : kCounts) {
      const auto inputs = as_bf16(ordinary_floats(num_sources, count));

      const auto sums = reduced_bf16(reduce_in_hops, Reduction::kSum, inputs);
      const auto averages = reduced_bf16(reduce_in_hops, Reduction::kAvg, inputs);

      for (std::size_t i = 0; i < sums.size(); ++i) {
        std::uint16_t expected = inputs[0][i];
        for (std::size_t s = 1; s < inputs.size(); ++s) expected = bf16_sum(expected, inputs[s][i]);
        ASSERT_EQ(sums[i], expected) << num_sources << " sources, element " << i;
        ASSERT_EQ(averages[i], bf16_quotient(expected, inputs.size()))
            << num_sources << " sources, element " << i;
      }
    }
  }
}

TEST(ReduceInPairs, OfFiveAddsPairsOfPairsAndTheFifthLast) {
  for (const std::int64_t count : kCounts) {
    const auto inputs = as_bf16(ordinary_floats(5, count));

    const auto sums = reduced_bf16(reduce_in_pairs, Reduction::kSum, inputs);
    const auto averages = reduced_bf16(reduce_in_pairs, Reduction::kAvg, inputs);

    for (std::size_t i = 0; i < sums.size(); ++i) {
      const auto left = bf16_sum(inputs[0][i], inputs[1][i]);
      const auto right = bf16_sum(inputs[2][i], inputs[3][i]);
      const auto expected = bf16_sum(bf16_sum(left, right), inputs[4][i]);
      ASSERT_EQ(sums[i], expected) << "element " << i;
      ASSERT_EQ(averages[i], bf16_quotient(expected, 5)) << "element " << i;
    }
  }
}

TEST(ReduceInPairs, OutputMayBeASource) {
  auto inputs = as_bf16(ordinary_floats(4, 3001));
  const auto expected = reduced_bf16(reduce_in_pairs, Reduction::kSum, inputs);
  std::vector<const std::byte*> sources;
  for (const auto& input : inputs)
    sources.push_back(reinterpret_cast<const std::byte*>(input.data()));

  reduce_in_pairs(Reduction::kSum, Dtype::kBFloat16, sources,
                  reinterpret_cast<std::byte*>(inputs[2].data()), 3001);

  EXPECT_EQ(inputs[2], expected);
  EXPECT_THROW(reduce_in_pairs(Reduction::kSum, Dtype::kBFloat16, {}, nullptr, 0), ShapeError);
  EXPECT_THROW(reduce_in_hops(Reduction::kSum, Dtype::kBFloat16, {}, nullptr, 0), ShapeError);
}

}  // namespace
}  // namespace isoshard
