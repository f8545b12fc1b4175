// SPDX-License-Identifier: Apache-2.0
/// Claims about the comparing kernels, held against a scalar model that is written differently.
#include "harness/stats/stats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/base/float_bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace isoshard {
namespace {

using Bytes = std::vector<std::byte>;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

Bytes encode(const std::vector<double>& values, Dtype dtype) {
  Bytes out(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto store = [&](auto value) {
      std::memcpy(out.data() + i * sizeof(value), &value, sizeof(value));
    };
    switch (dtype) {
      case Dtype::kFloat64:
        store(values[i]);
        break;
      case Dtype::kFloat32:
        store(static_cast<float>(values[i]));
        break;
      case Dtype::kBFloat16:
        store(float_to_bf16(static_cast<float>(values[i])));
        break;
      case Dtype::kFloat16:
        store(float_to_fp16(static_cast<float>(values[i])));
        break;
      case Dtype::kInt64:
        store(static_cast<std::int64_t>(values[i]));
        break;
      case Dtype::kInt32:
        store(static_cast<std::int32_t>(values[i]));
        break;
      case Dtype::kInt16:
        store(static_cast<std::int16_t>(values[i]));
        break;
      case Dtype::kInt8:
        store(static_cast<std::int8_t>(values[i]));
        break;
      case Dtype::kUint8:
        store(static_cast<std::uint8_t>(values[i]));
        break;
      case Dtype::kBool:
        store(static_cast<std::uint8_t>(values[i] != 0));
        break;
    }
  }
  return out;
}

Stats compare(const std::vector<double>& reference, Dtype rd, const std::vector<double>& actual,
              Dtype ad, double grad_scale = 1, std::int64_t index = 0) {
  Stats stats;
  const Bytes r = encode(reference, rd);
  const Bytes a = encode(actual, ad);
  accumulate(stats, r.data(), rd, a.data(), ad, static_cast<std::int64_t>(reference.size()), index,
             grad_scale);
  return stats;
}

Stats compare_f32(const std::vector<double>& reference, const std::vector<double>& actual,
                  double grad_scale = 1) {
  return compare(reference, Dtype::kFloat32, actual, Dtype::kFloat32, grad_scale);
}

std::vector<double> small_integers(std::size_t n, std::uint32_t seed, int limit = 100) {
  std::mt19937 generator(seed);
  std::vector<double> values(n);
  for (double& v : values) v = static_cast<double>(generator() % static_cast<unsigned>(limit));
  return values;
}

TEST(Stats, EveryLengthGivesTheExactSums) {
  for (std::size_t n :
       {0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 70, 511, 512, 513, 1025}) {
    const std::vector<double> r = small_integers(n, 1);
    const std::vector<double> a = small_integers(n, 2);
    Stats want;
    for (std::size_t i = 0; i < n; ++i) {
      want.sum_sq_reference += r[i] * r[i];
      want.sum_sq_actual += a[i] * a[i];
      want.sum_sq_diff += (a[i] - r[i]) * (a[i] - r[i]);
      want.dot += r[i] * a[i];
      want.sum_abs_diff += std::fabs(a[i] - r[i]);
      want.sum_diff += a[i] - r[i];
      want.unequal_values += a[i] != r[i];
      if (std::fabs(a[i] - r[i]) > want.max_abs) {
        want.max_abs = std::fabs(a[i] - r[i]);
        want.worst = static_cast<std::int64_t>(i) + 1000;
      }
      if (a[i] != r[i] && want.first_unequal < 0)
        want.first_unequal = static_cast<std::int64_t>(i) + 1000;
    }

    const Stats got = compare(r, Dtype::kFloat32, a, Dtype::kFloat32, 1, 1000);

    EXPECT_EQ(got.numel, static_cast<std::int64_t>(n));
    EXPECT_EQ(got.sum_sq_reference, want.sum_sq_reference) << n;
    EXPECT_EQ(got.sum_sq_actual, want.sum_sq_actual) << n;
    EXPECT_EQ(got.sum_sq_diff, want.sum_sq_diff) << n;
    EXPECT_EQ(got.dot, want.dot) << n;
    EXPECT_EQ(got.sum_abs_diff, want.sum_abs_diff) << n;
    EXPECT_EQ(got.sum_diff, want.sum_diff) << n;
    EXPECT_EQ(got.unequal_values, want.unequal_values) << n;
    EXPECT_EQ(got.unequal_bits, want.unequal_values) << n;
    EXPECT_EQ(got.max_abs, want.max_abs) << n;
    EXPECT_EQ(got.worst, want.worst) << n;
    EXPECT_EQ(got.first_unequal, want.first_unequal) << n;
  }
}

TEST(Stats, ANanOnOneSideIsSeenAtEveryPosition) {
  for (std::size_t n = 1; n <= 70; ++n) {
    for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
      for (const bool on_reference : {true, false}) {
        for (const double poison : {kNan, kInf, -kInf}) {
          const std::vector<double> clean = small_integers(n, 3);
          std::vector<double> bad = clean;
          bad[at] = poison;

          const Stats got = on_reference ? compare_f32(bad, clean) : compare_f32(clean, bad);

          ASSERT_EQ(got.nonfinite_mismatch, 1) << n << " at " << at;
          ASSERT_EQ(got.unequal_values, 1);
          ASSERT_EQ(got.unequal_bits, 1);
          ASSERT_EQ(got.first_unequal, static_cast<std::int64_t>(at));
          ASSERT_EQ(got.nan_reference + got.nan_actual + got.inf_reference + got.inf_actual, 1);
          ASSERT_EQ(on_reference ? got.nan_actual + got.inf_actual
                                 : got.nan_reference + got.inf_reference,
                    0);
          ASSERT_EQ(got.sum_sq_diff, 0) << "sums are over finite pairs only";
        }
      }
    }
  }
}

TEST(Stats, NonFiniteOnBothSidesAgreesOnlyIfItIsTheSame) {
  EXPECT_EQ(compare_f32({kNan, kInf, -kInf}, {kNan, kInf, -kInf}).nonfinite_mismatch, 0);
  EXPECT_EQ(compare_f32({kNan, kInf, -kInf}, {kNan, kInf, -kInf}).unequal_values, 0);
  EXPECT_EQ(compare_f32({kInf}, {-kInf}).nonfinite_mismatch, 1);
  EXPECT_EQ(compare_f32({kInf}, {kNan}).nonfinite_mismatch, 1);
}

TEST(Stats, SignedZerosDifferInBitsOnly) {
  const Stats got = compare_f32({0.0, -0.0, 0.0}, {-0.0, 0.0, 0.0});
  EXPECT_EQ(got.unequal_bits, 2);
  EXPECT_EQ(got.unequal_values, 0);
  EXPECT_EQ(got.first_unequal, -1);
}

TEST(Stats, OneUlpIsOneStepOfTheCoarserDtype) {
  EXPECT_EQ(compare_f32({1.0}, {1.0 + 0x1p-23}).max_ulp, 1);
  EXPECT_EQ(compare_f32({3.0}, {3.0 - 0x1p-21}).max_ulp, 2);
  EXPECT_EQ(compare({1.0}, Dtype::kFloat64, {1.0 + 0x1p-52}, Dtype::kFloat64).max_ulp, 1);
  EXPECT_EQ(compare({1.0}, Dtype::kBFloat16, {1.0 + 0x1p-7}, Dtype::kBFloat16).max_ulp, 1);
  EXPECT_EQ(compare({1.0}, Dtype::kFloat16, {1.0 + 0x1p-10}, Dtype::kFloat16).max_ulp, 1);
  EXPECT_EQ(compare({1.0}, Dtype::kFloat32, {1.0 + 0x1p-7}, Dtype::kBFloat16).max_ulp, 1);
  EXPECT_EQ(compare({1.0}, Dtype::kBFloat16, {1.0 + 0x1p-8}, Dtype::kFloat32).max_ulp, 0.5);
  EXPECT_EQ(compare_f32({0.0}, {0x1p-149}).max_ulp, 1) << "a subnormal step at zero";
  EXPECT_EQ(compare({0.0}, Dtype::kFloat64, {0x1p-1074}, Dtype::kFloat64).max_ulp, 1);
  EXPECT_EQ(compare({7}, Dtype::kInt64, {9}, Dtype::kInt64).max_ulp, 2);
}

TEST(Stats, IntegersBeyondFp64AreComparedExactly) {
  const std::int64_t big = (std::int64_t{1} << 60) + 1;
  const std::int64_t other = std::int64_t{1} << 60;
  Stats stats;

  accumulate(stats, reinterpret_cast<const std::byte*>(&big), Dtype::kInt64,
             reinterpret_cast<const std::byte*>(&other), Dtype::kInt64, 1, 0);

  EXPECT_EQ(stats.unequal_values, 1);
  EXPECT_EQ(stats.max_abs, 1);
}

TEST(Stats, GradScaleIsDividedOutOfActual) {
  const Stats got = compare_f32({1, 2, 3}, {3, 6, 9}, 3.0);
  EXPECT_EQ(got.unequal_bits, 0);
  EXPECT_EQ(got.max_abs, 0);
  EXPECT_EQ(got.scale(), 1);
  EXPECT_EQ(compare_f32({1, 2, 3}, {3, 6, 9}).scale(), 3);
}

TEST(Stats, LeftOutElementsCountNowhere) {
  const Bytes r = encode({1, 2, 3, 4}, Dtype::kFloat32);
  const Bytes a = encode({1, 9, kNan, 4}, Dtype::kFloat32);
  const std::vector<std::uint8_t> selected{1, 0, 0, 1};
  Stats stats;

  accumulate(stats, r.data(), Dtype::kFloat32, a.data(), Dtype::kFloat32, 4, 0, 1.0,
             selected.data());

  EXPECT_EQ(stats.numel, 2);
  EXPECT_EQ(stats.unequal_values, 0);
  EXPECT_EQ(stats.nan_actual, 0);
  EXPECT_EQ(stats.sum_sq_reference, 17);
}

TEST(Stats, ErrorScaleAndCosineOfZeroTensors) {
  EXPECT_EQ(compare_f32({0, 0}, {0, 0}).relative_error(), 0);
  EXPECT_EQ(compare_f32({0, 0}, {0, 1}).relative_error(), kInf);
  EXPECT_EQ(compare_f32({0, 0}, {0, 1}).scale(), 1);
  EXPECT_EQ(compare_f32({0, 0}, {0, 0}).cosine(), 1);
  EXPECT_EQ(compare_f32({1, 0}, {0, 1}).cosine(), 0);
  EXPECT_DOUBLE_EQ(compare_f32({3, 4}, {3, 4.5}).relative_error(), 0.1);
}

TEST(Stats, MergingTwoHalvesIsTheWhole) {
  const std::vector<double> r = small_integers(1000, 5);
  std::vector<double> a = r;
  a[0] += 1;
  a[600] += 7;
  a[900] = kNan;
  const Stats whole = compare_f32(r, a);
  Stats left = compare(std::vector<double>(r.begin(), r.begin() + 500), Dtype::kFloat32,
                       std::vector<double>(a.begin(), a.begin() + 500), Dtype::kFloat32);
  const Stats right =
      compare(std::vector<double>(r.begin() + 500, r.end()), Dtype::kFloat32,
              std::vector<double>(a.begin() + 500, a.end()), Dtype::kFloat32, 1, 500);
  Stats reversed = right;

  merge(reversed, left);
  merge(left, right);

  for (const Stats& got : {left, reversed}) {
    EXPECT_EQ(got.numel, whole.numel);
    EXPECT_EQ(got.sum_sq_diff, whole.sum_sq_diff);
    EXPECT_EQ(got.dot, whole.dot);
    EXPECT_EQ(got.worst, 600);
    EXPECT_EQ(got.max_abs, 7);
    EXPECT_EQ(got.first_unequal, 0);
    EXPECT_EQ(got.nonfinite_mismatch, 1);
    EXPECT_EQ(got.unequal_values, 3);
  }
}

TEST(Stats, AlignmentDoesNotChangeABit) {
  std::mt19937 generator(11);
  std::normal_distribution<double> normal;
  std::vector<double> r(777), a(777);
  for (double& v : r) v = normal(generator);
  for (double& v : a) v = normal(generator);
  const Stats want = compare_f32(r, a);
  Bytes rb = encode(r, Dtype::kFloat32);
  Bytes ab = encode(a, Dtype::kFloat32);
  rb.insert(rb.begin(), 3, std::byte{});
  ab.insert(ab.begin(), 1, std::byte{});
  Stats got;

  accumulate(got, rb.data() + 3, Dtype::kFloat32, ab.data() + 1, Dtype::kFloat32, 777, 0);

  EXPECT_EQ(std::bit_cast<std::uint64_t>(got.sum_sq_diff),
            std::bit_cast<std::uint64_t>(want.sum_sq_diff));
  EXPECT_EQ(std::bit_cast<std::uint64_t>(got.dot), std::bit_cast<std::uint64_t>(want.dot));
}

#if defined(__x86_64__)
TEST(Stats, FlushToZeroOfTheCallerIsIgnoredAndRestored) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);

  const Stats got =
      compare({0.0, 0x1p-1074}, Dtype::kFloat64, {0x1p-1060, 0x1p-1074}, Dtype::kFloat64);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);

  EXPECT_EQ(got.unequal_values, 1);
  EXPECT_EQ(got.max_abs, 0x1p-1060);
  EXPECT_EQ(after & 0x8040U, 0x8040U);
}
#endif

class StatsOfEveryDtype : public testing::TestWithParam<std::tuple<Dtype, Dtype>> {};

TEST_P(StatsOfEveryDtype, EqualAndUnequalAreToldApartAtEveryPlace) {
  const auto [rd, ad] = GetParam();
  const bool has_bool = rd == Dtype::kBool || ad == Dtype::kBool;
  for (std::size_t n = 1; n <= 70; n += has_bool ? 3 : 1) {
    const std::vector<double> r =
        small_integers(n, static_cast<std::uint32_t>(n), has_bool ? 2 : 100);
    EXPECT_EQ(compare(r, rd, r, ad).unequal_values, 0);
    for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
      std::vector<double> a = r;
      a[at] = has_bool ? 1 - r[at] : r[at] + 1;

      const Stats got = compare(r, rd, a, ad);

      ASSERT_EQ(got.unequal_values, 1) << n << " at " << at;
      ASSERT_EQ(got.unequal_bits, 1);
      ASSERT_EQ(got.first_unequal, static_cast<std::int64_t>(at));
      ASSERT_EQ(got.worst, static_cast<std::int64_t>(at));
      ASSERT_EQ(got.max_abs, 1);
      ASSERT_EQ(got.sum_sq_diff, 1);
    }
  }
}

const Dtype kEvery[] = {Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16,
                        Dtype::kInt64,   Dtype::kInt32,   Dtype::kInt16,    Dtype::kInt8,
                        Dtype::kUint8,   Dtype::kBool};
INSTANTIATE_TEST_SUITE_P(Pairs, StatsOfEveryDtype,
                         testing::Combine(testing::ValuesIn(kEvery), testing::ValuesIn(kEvery)),
                         [](const auto& param_info) {
                           return std::string(name_of(std::get<0>(param_info.param))) + "_" +
                                  std::string(name_of(std::get<1>(param_info.param)));
                         });

}  // namespace
}  // namespace isoshard
