// SPDX-License-Identifier: Apache-2.0
/// Kernel bodies on emulated grids say what the CPU's loops say: counts, maxima, positions and
/// digests exactly, sums within 1e-12.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/float_bits.h"
#include "harness/stats/device/device_stats.h"
#include "harness/stats/device/emulated_grid.h"

namespace isoshard {
namespace {

using Bytes = std::vector<std::byte>;

constexpr Dtype kDtypes[] = {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16,
                             Dtype::kInt64,   Dtype::kInt32,   Dtype::kInt16,    Dtype::kInt8,
                             Dtype::kUint8,   Dtype::kBool};
// a block of fp32 has 2048 elements, one of bf16 4096
constexpr std::int64_t kCounts[] = {0,   1,    2,    31,   32,   33,   63,   65,
                                    129, 2047, 2048, 2049, 4096, 4097, 8193, 10'001};

/// How `actual` differs from the reference.
enum class Change { kNone, kFewUlps, kRare, kNegated, kUnrelated, kSpecial, kOneSpecial };
constexpr Change kChanges[] = {Change::kNone,      Change::kFewUlps,   Change::kRare,
                               Change::kNegated,   Change::kUnrelated, Change::kSpecial,
                               Change::kOneSpecial};

struct Pair {
  Bytes reference, actual;
};

void put(Bytes& bytes, Dtype dtype, std::uint64_t bits) {
  const auto* const from = reinterpret_cast<const std::byte*>(&bits);
  bytes.insert(bytes.end(), from, from + size_of(dtype));
}

/// Zero of both signs, subnormals, the largest and smallest, infinities, NaN with payloads and
/// signals, as bits.
std::uint64_t special_bits(Dtype dtype, std::uint32_t pick) {
  const int fraction = dtype == Dtype::kFloat64    ? 52
                       : dtype == Dtype::kFloat32  ? 23
                       : dtype == Dtype::kBFloat16 ? 7
                                                   : 10;
  const int width = static_cast<int>(size_of(dtype)) * 8;
  const std::uint64_t sign = std::uint64_t{1} << (width - 1);
  const std::uint64_t infinity = (sign - 1) >> fraction << fraction;
  const std::uint64_t one = std::uint64_t{1} << fraction;
  const std::uint64_t values[] = {0,
                                  1,
                                  one - 1,
                                  one,
                                  infinity,
                                  infinity - 1,
                                  infinity | 1,
                                  infinity | one >> 1,
                                  infinity | (one - 1),
                                  infinity / 2 / one * one};
  const std::uint64_t value = values[pick % std::size(values)];
  return pick / std::size(values) % 2 == 0 ? value : value | sign;
}

std::uint64_t ordinary_bits(Dtype dtype, std::mt19937& generator) {
  const double value = std::normal_distribution<double>()(generator);
  switch (dtype) {
    case Dtype::kFloat64:
      return std::bit_cast<std::uint64_t>(value);
    case Dtype::kFloat32:
      return std::bit_cast<std::uint32_t>(static_cast<float>(value));
    case Dtype::kBFloat16:
      return float_to_bf16(static_cast<float>(value));
    case Dtype::kFloat16:
      return float_to_fp16(static_cast<float>(value));
    case Dtype::kBool:
      return generator() % 2;
    case Dtype::kInt64:
      return (std::uint64_t{generator()} << 32) | generator();
    default:
      return generator();
  }
}

Pair make_pair(Dtype dtype, std::int64_t count, Change change, std::uint32_t seed) {
  std::mt19937 generator(seed);
  const std::uint64_t sign = std::uint64_t{1} << (size_of(dtype) * 8 - 1);
  const std::int64_t special_at = count > 0 ? static_cast<std::int64_t>(generator() % count) : 0;
  Pair pair;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint64_t r = ordinary_bits(dtype, generator);
    const bool is_special =
        is_floating(dtype) &&
        (change == Change::kSpecial || (change == Change::kOneSpecial && i == special_at));
    if (is_special && generator() % 2 == 0) r = special_bits(dtype, generator());
    std::uint64_t a = r;
    if (dtype != Dtype::kBool) {
      if (change == Change::kFewUlps) a += generator() % 4;
      if (change == Change::kRare && generator() % 400 == 0) a += 1 + generator() % 4;
      if (change == Change::kNegated) a ^= sign;
    }
    if (change == Change::kUnrelated || is_special) a = ordinary_bits(dtype, generator);
    if (is_special && generator() % 2 == 0) a = special_bits(dtype, generator());
    put(pair.reference, dtype, r);
    put(pair.actual, dtype, a);
  }
  return pair;
}

/// Sums differ by their order in fp64 alone. One that overflows on a CPU is no number here either:
/// an infinity, or, where signs differ, NaN.
void expect_sum(double got, double want, double magnitudes, const char* name) {
  if (!std::isfinite(want)) {
    EXPECT_FALSE(std::isfinite(got)) << name;
    return;
  }
  EXPECT_NEAR(got, want, 1e-12 * magnitudes) << name;
}

void expect_same(const Stats& got, const Stats& want) {
  EXPECT_EQ(got.numel, want.numel);
  EXPECT_EQ(got.unequal_bits, want.unequal_bits);
  EXPECT_EQ(got.unequal_values, want.unequal_values);
  EXPECT_EQ(got.nan_reference, want.nan_reference);
  EXPECT_EQ(got.nan_actual, want.nan_actual);
  EXPECT_EQ(got.inf_reference, want.inf_reference);
  EXPECT_EQ(got.inf_actual, want.inf_actual);
  EXPECT_EQ(got.nonfinite_mismatch, want.nonfinite_mismatch);
  EXPECT_EQ(got.first_unequal, want.first_unequal);
  EXPECT_EQ(got.worst, want.worst);
  EXPECT_EQ(got.max_abs, want.max_abs);
  EXPECT_EQ(got.max_ulp, want.max_ulp);
  EXPECT_EQ(got.max_abs_reference, want.max_abs_reference);
  expect_sum(got.sum_sq_reference, want.sum_sq_reference, want.sum_sq_reference, "sq reference");
  expect_sum(got.sum_sq_actual, want.sum_sq_actual, want.sum_sq_actual, "sq actual");
  expect_sum(got.sum_sq_diff, want.sum_sq_diff, want.sum_sq_diff, "sq diff");
  expect_sum(got.sum_abs_diff, want.sum_abs_diff, want.sum_abs_diff, "abs diff");
  expect_sum(got.sum_diff, want.sum_diff, want.sum_abs_diff, "diff");
  expect_sum(got.dot, want.dot, std::sqrt(want.sum_sq_reference) * std::sqrt(want.sum_sq_actual),
             "dot");
}

class DeviceCompareBodyOf : public testing::TestWithParam<Dtype> {};

TEST_P(DeviceCompareBodyOf, EverySizeAndChangeIsAsOnTheCpu) {
  const Dtype dtype = GetParam();
  std::uint32_t seed = 0;
  for (const std::int64_t count : kCounts) {
    for (const Change change : kChanges) {
      const Pair pair = make_pair(dtype, count, change, ++seed);
      for (const double scale : {1.0, 3.0}) {
        Stats want;
        Stats got;
        Stats of_three_warps;
        accumulate(want, pair.reference.data(), dtype, pair.actual.data(), dtype, count, 1000,
                   scale);

        device::emulate_accumulate(got, pair.reference.data(), dtype, pair.actual.data(), dtype,
                                   count, 1000, scale);
        device::emulate_accumulate(of_three_warps, pair.reference.data(), dtype, pair.actual.data(),
                                   dtype, count, 1000, scale, nullptr, 3);

        SCOPED_TRACE(testing::Message() << count << " elements, change " << static_cast<int>(change)
                                        << ", scale " << scale << ", seed " << seed);
        expect_same(got, want);
        expect_same(of_three_warps, want);
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, DeviceCompareBodyOf, testing::ValuesIn(kDtypes),
                         [](const auto& param_info) {
                           return std::string(name_of(param_info.param));
                         });

TEST(DeviceCompareBody, EveryPairOfDtypesIsAsOnTheCpuWithAndWithoutASelection) {
  constexpr std::int64_t kCount = 4100;
  std::mt19937 generator(7);
  std::vector<std::uint8_t> selected;
  for (std::int64_t i = 0; i < kCount; ++i)
    selected.push_back(static_cast<std::uint8_t>(generator() % 3));
  std::uint32_t seed = 100;
  for (const Dtype r : kDtypes) {
    for (const Dtype a : kDtypes) {
      const Pair of_r = make_pair(r, kCount, Change::kSpecial, ++seed);
      const Pair of_a = make_pair(a, kCount, Change::kSpecial, ++seed);
      for (const std::uint8_t* some : {static_cast<const std::uint8_t*>(nullptr),
                                       static_cast<const std::uint8_t*>(selected.data())}) {
        Stats want;
        Stats got;
        accumulate(want, of_r.reference.data(), r, of_a.actual.data(), a, kCount, 5, 1.0, some);

        device::emulate_accumulate(got, of_r.reference.data(), r, of_a.actual.data(), a, kCount, 5,
                                   1.0, some);

        SCOPED_TRACE(testing::Message() << name_of(r) << " " << name_of(a));
        expect_same(got, want);
      }
    }
  }
}

// Maxima and positions that several blocks share: the first one's is told, whichever warp has it.
TEST(DeviceCompareBody, TheFirstOfEqualMaximaIsTheWorst) {
  std::vector<float> reference(10'000, 1.0F);
  std::vector<float> actual = reference;
  for (const std::size_t i : {2500, 4700, 9999}) actual[i] = 1.5F;
  Stats got;

  device::emulate_accumulate(got, reinterpret_cast<const std::byte*>(reference.data()),
                             Dtype::kFloat32, reinterpret_cast<const std::byte*>(actual.data()),
                             Dtype::kFloat32, 10'000, 0);

  EXPECT_EQ(got.worst, 2500);
  EXPECT_EQ(got.first_unequal, 2500);
  EXPECT_EQ(got.unequal_values, 3);
}

TEST(DeviceCompareBody, ResultsAddUpAsOnTheCpu) {
  const Pair pair = make_pair(Dtype::kBFloat16, 9000, Change::kFewUlps, 3);
  Stats want;
  Stats got;
  for (const std::int64_t begin : {0, 5000}) {
    const std::int64_t count = begin == 0 ? 5000 : 4000;
    accumulate(want, pair.reference.data() + 2 * begin, Dtype::kBFloat16,
               pair.actual.data() + 2 * begin, Dtype::kBFloat16, count, begin);
    device::emulate_accumulate(got, pair.reference.data() + 2 * begin, Dtype::kBFloat16,
                               pair.actual.data() + 2 * begin, Dtype::kBFloat16, count, begin);
  }

  EXPECT_EQ(got.numel, 9000);
  expect_same(got, want);
}

TEST(DeviceDigestBody, EveryLengthAndSeedGivesTheDigestOfTheCpu) {
  std::mt19937 generator(11);
  Bytes bytes(70'000);
  for (std::byte& b : bytes) b = static_cast<std::byte>(generator());
  std::vector<std::size_t> lengths;
  for (std::size_t n = 0; n <= 2200; ++n) lengths.push_back(n);
  for (const std::size_t blocks : {3, 8, 16, 64}) {
    for (const std::size_t n : {blocks * 1024 - 1, blocks * 1024, blocks * 1024 + 1,
                                blocks * 1024 + 63, blocks * 1024 + 64, blocks * 1024 + 65})
      lengths.push_back(n);
  }
  lengths.push_back(bytes.size());

  for (const std::size_t n : lengths) {
    for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0} / 3}) {
      ASSERT_EQ(device::emulate_digest(bytes.data(), n, seed), digest_of(bytes.data(), n, seed))
          << n << " bytes, seed " << seed;
    }
  }
}

TEST(DeviceDigestBody, OneBitAnywhereChangesIt) {
  Bytes bytes(5000);
  const std::uint64_t whole = device::emulate_digest(bytes.data(), bytes.size());
  for (const std::size_t i : {0, 1023, 1024, 2500, 4095, 4096, 4935, 4936, 4999}) {
    bytes[i] ^= std::byte{4};
    EXPECT_NE(device::emulate_digest(bytes.data(), bytes.size()), whole) << i;
    bytes[i] ^= std::byte{4};
  }
}

TEST(DeviceStatsBuild, WithoutCudaTheClassSaysThatItIsNotBuilt) {
  if (has_device_stats()) return;  // tests of label gpu have it
  EXPECT_THROW(DeviceStats(nullptr), NotBuiltError);
}

}  // namespace
}  // namespace isoshard
