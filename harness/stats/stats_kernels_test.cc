// SPDX-License-Identifier: Apache-2.0
/// Every set of loops that this CPU runs gives the bits of the plain one, and narrow blocks say
/// what a scalar model says.
#include "harness/stats/stats_kernels.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/base/float_bits.h"

namespace isoshard {
namespace {

using Bytes = std::vector<std::byte>;

/// All numbers of a Stats as bits, so that NaN equals itself and -0 does not equal +0.
std::string bits_of(const Stats& s) {
  std::string text;
  for (const std::int64_t n :
       {s.numel, s.unequal_bits, s.unequal_values, s.nan_reference, s.nan_actual, s.inf_reference,
        s.inf_actual, s.nonfinite_mismatch, s.first_unequal, s.worst})
    text += fmt::format("{} ", n);
  for (const double x : {s.max_abs, s.max_ulp, s.sum_sq_reference, s.sum_sq_actual, s.sum_sq_diff,
                         s.dot, s.sum_abs_diff, s.max_abs_reference, s.sum_diff})
    text += fmt::format("{:a} ", x);
  return text;
}

/// Tensors of one dtype as bit patterns.
struct Pair {
  std::vector<std::uint32_t> reference, actual;
};

const std::uint32_t kMalformed32[] = {
    0,          0x80000000, 1,          0x80000001, 0x007fffff, 0x00800000, 0x807fffff,
    0x21000000, 0x217fffff, 0x21800000, 0x5d7fffff, 0x5d800000, 0x5f800000, 0x7f7fffff,
    0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffc12345, 0x3f800000,
    0x3f800001, 0x3f7fffff, 0xbf800000, 0x40490fdb, 0x4b7fffff};

/// The ways two tensors differ: `ordinary` values of magnitude near 1 and what is done to them.
enum class Change {
  kNone,
  kFewUlps,
  kSomeUlps,
  kOneMalformed,
  kAllMalformed,
  kNegated,
  kZeroSigns,
  kTiny,
  kTinyUlps,
  kHuge,
  kUnrelated,
  kMixedUlps
};
constexpr Change kChanges[] = {Change::kNone,         Change::kFewUlps,      Change::kSomeUlps,
                               Change::kOneMalformed, Change::kAllMalformed, Change::kNegated,
                               Change::kZeroSigns,    Change::kTiny,         Change::kTinyUlps,
                               Change::kHuge,         Change::kUnrelated,    Change::kMixedUlps};

Pair make_pair(std::size_t count, Dtype dtype, Change change, std::uint32_t seed) {
  std::mt19937 generator(seed);
  const bool is_bf16 = dtype == Dtype::kBFloat16;
  const auto ordinary = [&] {
    const float value = std::normal_distribution<float>()(generator);
    return is_bf16 ? std::uint32_t{float_to_bf16(value)} : std::bit_cast<std::uint32_t>(value);
  };
  const auto malformed = [&] {
    const std::uint32_t bits = kMalformed32[generator() % std::size(kMalformed32)];
    return is_bf16 ? bits >> 16 : bits;
  };
  const std::uint32_t exponent_step = is_bf16 ? 1U << 7 : 1U << 23;
  const std::uint32_t sign = is_bf16 ? 0x8000U : 0x80000000U;
  Pair pair;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t r = ordinary();
    if (change == Change::kTiny || change == Change::kTinyUlps)
      r = (r & sign) | ((r & ~sign) > 100 * exponent_step ? (r & ~sign) - 100 * exponent_step : 0);
    if (change == Change::kHuge) r += 70 * exponent_step;
    if (change == Change::kZeroSigns && i % 3 == 0) r = i % 2 == 0 ? 0 : sign;
    if (change == Change::kAllMalformed) r = malformed();
    // down to subnormal
    if (change == Change::kMixedUlps && i % 5 == 0)
      r = (r & sign) | (generator() % (3 * exponent_step));
    std::uint32_t a = r;
    if (change == Change::kFewUlps || change == Change::kMixedUlps || change == Change::kTinyUlps ||
        change == Change::kHuge)
      a += generator() % 4;
    if (change == Change::kSomeUlps && generator() % 300 == 0) a += 1 + generator() % 4;
    if (change == Change::kZeroSigns && (a & ~sign) == 0) a ^= generator() % 2 == 0 ? sign : 0;
    if (change == Change::kNegated) a ^= sign;
    if (change == Change::kUnrelated) a = ordinary();
    if (change == Change::kAllMalformed && generator() % 2 == 0) a = malformed();
    pair.reference.push_back(r);
    pair.actual.push_back(a);
  }
  if (change == Change::kOneMalformed && count > 0) {
    (seed % 2 == 0 ? pair.actual : pair.reference)[generator() % count] = malformed();
  }
  return pair;
}

Bytes bytes_of(const std::vector<std::uint32_t>& patterns, Dtype dtype, std::size_t offset) {
  Bytes out(offset);
  for (const std::uint32_t pattern : patterns) {
    const auto* const from = reinterpret_cast<const std::byte*>(&pattern);
    out.insert(out.end(), from, from + size_of(dtype));
  }
  return out;
}

Stats run(const StatsKernels& kernels, const Pair& pair, Dtype dtype, std::size_t offset = 0,
          double grad_scale = 1) {
  Stats stats;
  const Bytes r = bytes_of(pair.reference, dtype, offset);
  const Bytes a = bytes_of(pair.actual, dtype, offset == 0 ? 0 : offset + 2);
  accumulate_with(kernels, stats, r.data() + offset, dtype,
                  a.data() + (offset == 0 ? 0 : offset + 2), dtype,
                  static_cast<std::int64_t>(pair.reference.size()), 1000, grad_scale);
  return stats;
}

class StatsKernelsOf : public testing::TestWithParam<Dtype> {};

TEST_P(StatsKernelsOf, EverySetGivesThePlainBitsForEveryLengthAndValue) {
  ASSERT_STREQ(stats_kernels().front()->name, "plain");
  std::vector<std::size_t> lengths;
  for (std::size_t n = 0; n <= 200; ++n) lengths.push_back(n);
  lengths.insert(lengths.end(), {511, 512, 513, 2047, 2048, 2049, 4095, 4096, 4097, 10'000});
  std::uint32_t seed = 0;

  for (const std::size_t n : lengths) {
    for (const Change change : kChanges) {
      const Pair pair = make_pair(n, GetParam(), change, ++seed);
      const std::string want = bits_of(run(kPlainStatsKernels, pair, GetParam()));
      for (const StatsKernels* kernels : stats_kernels()) {
        ASSERT_EQ(bits_of(run(*kernels, pair, GetParam())), want)
            << kernels->name << ", " << n << " elements, change " << static_cast<int>(change);
        ASSERT_EQ(bits_of(run(*kernels, pair, GetParam(), 1 + seed % 63)), want)
            << kernels->name << ", unaligned";
        if (n < 50) {
          ASSERT_EQ(bits_of(run(*kernels, pair, GetParam(), 0, 3.0)),
                    bits_of(run(kPlainStatsKernels, pair, GetParam(), 0, 3.0)));
        }
      }
    }
  }
}

/// In fp64 and one element after the other; differences of fp32 and bf16 are rounded to fp32 as
/// Stats says.
TEST_P(StatsKernelsOf, CountsMaximaAndPositionsAreThoseOfAScalarModel) {
  const Dtype dtype = GetParam();
  const bool is_bf16 = dtype == Dtype::kBFloat16;
  std::uint32_t seed = 77;
  for (const std::size_t n : {1, 31, 200, 3000, 9000}) {
    for (const Change change : {Change::kFewUlps, Change::kSomeUlps, Change::kZeroSigns,
                                Change::kTinyUlps, Change::kHuge, Change::kMixedUlps}) {
      const Pair pair = make_pair(n, dtype, change, ++seed);
      Stats want;
      for (std::size_t i = 0; i < n; ++i) {
        const auto value = [&](std::uint32_t bits) {
          return is_bf16 ? bf16_to_float(static_cast<std::uint16_t>(bits))
                         : std::bit_cast<float>(bits);
        };
        const float r = value(pair.reference[i]);
        const float a = value(pair.actual[i]);
        const double d = std::fabs(static_cast<double>(a) - static_cast<double>(r));
        const int exponent = r == 0 ? -126 : std::max(std::ilogb(r), -126);
        want.unequal_bits += pair.reference[i] != pair.actual[i] ? 1 : 0;
        want.unequal_values += r != a ? 1 : 0;
        if (r != a && want.first_unequal < 0)
          want.first_unequal = 1000 + static_cast<std::int64_t>(i);
        if (d > want.max_abs) want.worst = 1000 + static_cast<std::int64_t>(i);
        want.max_abs = std::max(want.max_abs, d);
        want.max_ulp = std::max(want.max_ulp, std::ldexp(d, (is_bf16 ? 7 : 23) - exponent));
        want.max_abs_reference =
            std::max(want.max_abs_reference, std::fabs(static_cast<double>(r)));
        want.sum_sq_reference += static_cast<double>(r) * r;
        want.sum_sq_actual += static_cast<double>(a) * a;
        want.sum_sq_diff += d * d;
        want.sum_abs_diff += d;
        want.sum_diff += static_cast<double>(a) - r;
        // the part beyond the reference's square
        want.dot += static_cast<double>(r) * (static_cast<double>(a) - r);
      }

      const Stats got = run(*stats_kernels().back(), pair, dtype);

      SCOPED_TRACE(
          fmt::format("{} {} elements, change {}", name_of(dtype), n, static_cast<int>(change)));
      EXPECT_EQ(got.unequal_bits, want.unequal_bits);
      EXPECT_EQ(got.unequal_values, want.unequal_values);
      EXPECT_EQ(got.first_unequal, want.first_unequal);
      EXPECT_EQ(got.worst, want.worst);
      EXPECT_EQ(got.max_abs, want.max_abs);
      EXPECT_EQ(got.max_ulp, want.max_ulp);
      EXPECT_EQ(got.max_abs_reference, want.max_abs_reference);
      // 128 roundings of a lane in fp32; of fp32 squares in fp64
      const double bound = is_bf16 ? 0x1p-17 : 0x1p-40;
      EXPECT_NEAR(got.sum_sq_reference, want.sum_sq_reference, bound * want.sum_sq_reference);
      EXPECT_NEAR(
          got.sum_sq_actual, want.sum_sq_actual,
          2 * std::max(bound, 0x1p-17 * std::sqrt(want.sum_sq_diff / want.sum_sq_reference)) *
              want.sum_sq_actual);
      EXPECT_NEAR(got.sum_sq_diff, want.sum_sq_diff, 0x1p-17 * want.sum_sq_diff);
      EXPECT_NEAR(got.sum_abs_diff, want.sum_abs_diff, 0x1p-17 * want.sum_abs_diff);
      EXPECT_NEAR(got.sum_diff, want.sum_diff, 0x1p-17 * want.sum_abs_diff);
      EXPECT_NEAR(got.dot - got.sum_sq_reference, want.dot,
                  0x1p-17 * std::sqrt(want.sum_sq_diff * want.sum_sq_reference) +
                      0x1p-50 * want.sum_sq_reference);
    }
  }
}

TEST_P(StatsKernelsOf, EqualTensorsHaveOneNormAndNoDifference) {
  for (const StatsKernels* kernels : stats_kernels()) {
    for (const Change change : {Change::kNone, Change::kTiny}) {
      const Stats got = run(*kernels, make_pair(5000, GetParam(), change, 5), GetParam());

      EXPECT_EQ(got.sum_sq_actual, got.sum_sq_reference) << kernels->name;
      EXPECT_EQ(got.dot, got.sum_sq_reference);
      EXPECT_GT(got.sum_sq_reference, 0);
      EXPECT_EQ(got.sum_sq_diff, 0);
      EXPECT_EQ(got.max_ulp, 0);
      EXPECT_EQ(got.unequal_bits, 0);
      EXPECT_EQ(got.worst, -1);
    }
  }
}

// Tensors far apart: their sums do not follow from those of the reference and of rounded
// differences.
TEST_P(StatsKernelsOf, ASmallMultipleHasItsOwnNormAndScale) {
  const std::uint32_t sixteen_binades = GetParam() == Dtype::kBFloat16 ? 16U << 7 : 16U << 23;
  Pair pair = make_pair(5000, GetParam(), Change::kNone, 9);
  for (std::uint32_t& a : pair.actual) a -= sixteen_binades;

  const Stats got = run(*stats_kernels().back(), pair, GetParam());

  EXPECT_NEAR(got.scale() * 65536, 1, 1e-12);
  EXPECT_NEAR(got.sum_sq_actual / got.sum_sq_reference * 0x1p32, 1, 1e-12);
  EXPECT_NEAR(got.cosine(), 1, 1e-12);
}

INSTANTIATE_TEST_SUITE_P(Narrow, StatsKernelsOf, testing::Values(Dtype::kFloat32, Dtype::kBFloat16),
                         [](const auto& param_info) {
                           return std::string(name_of(param_info.param));
                         });

// The loops behind wide blocks, with dtypes that are never narrow.
TEST(StatsKernels, WideBlocksGiveThePlainBitsForEveryDtypePair) {
  std::mt19937 generator(3);
  const Dtype floats[] = {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16};
  for (const std::int64_t n : {1, 7, 8, 9, 200, 513, 1500}) {
    Bytes r(static_cast<std::size_t>(n) * 8);
    Bytes a(r.size());
    for (std::byte& b : r) b = static_cast<std::byte>(generator());
    for (std::byte& b : a) b = static_cast<std::byte>(generator());
    for (const Dtype rd : floats) {
      for (const Dtype ad : floats) {
        Stats want;
        accumulate_with(kPlainStatsKernels, want, r.data(), rd, a.data(), ad, n, 0);
        for (const StatsKernels* kernels : stats_kernels()) {
          Stats got;
          accumulate_with(*kernels, got, r.data(), rd, a.data(), ad, n, 0);
          ASSERT_EQ(bits_of(got), bits_of(want))
              << kernels->name << " " << name_of(rd) << " " << name_of(ad);
        }
      }
    }
  }
}

}  // namespace
}  // namespace isoshard
