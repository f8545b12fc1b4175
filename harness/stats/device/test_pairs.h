// SPDX-License-Identifier: Apache-2.0
/// Pairs of tensors of every dtype, and what kernels must say of them: for tests on an emulated
/// grid and on a GPU.
#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "core/base/float_bits.h"
#include "harness/stats/stats.h"

namespace isoshard {

using Bytes = std::vector<std::byte>;

inline constexpr Dtype kDtypes[] = {
    Dtype::kFloat64, Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16, Dtype::kInt64,
    Dtype::kInt32,   Dtype::kInt16,   Dtype::kInt8,     Dtype::kUint8,   Dtype::kBool};
// a block of fp32 has 2048 elements, one of bf16 4096
inline constexpr std::int64_t kCounts[] = {0,   1,    2,    31,   32,   33,   63,   65,
                                           129, 2047, 2048, 2049, 4096, 4097, 8193, 10'001};

/// How `actual` differs from the reference.
enum class Change { kNone, kFewUlps, kRare, kNegated, kUnrelated, kSpecial, kOneSpecial };
inline constexpr Change kChanges[] = {Change::kNone,      Change::kFewUlps,   Change::kRare,
                                      Change::kNegated,   Change::kUnrelated, Change::kSpecial,
                                      Change::kOneSpecial};

struct Pair {
  Bytes reference, actual;
};

inline void put(Bytes& bytes, Dtype dtype, std::uint64_t bits) {
  const auto* const from = reinterpret_cast<const std::byte*>(&bits);
  bytes.insert(bytes.end(), from, from + size_of(dtype));
}

/// Zero of both signs, subnormals, the largest and smallest, infinities, NaN with payloads and
/// signals, as bits.
inline std::uint64_t special_bits(Dtype dtype, std::uint32_t pick) {
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

inline std::uint64_t ordinary_bits(Dtype dtype, std::mt19937& generator) {
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

inline Pair make_pair(Dtype dtype, std::int64_t count, Change change, std::uint32_t seed) {
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

/// In which members two results differ more than they may, in words; empty if in none. Counts,
/// maxima and positions must be equal. Sums differ by their order in fp64 alone: by 1e-12 of the
/// sum of magnitudes. One that overflows on a CPU is no number elsewhere either: an infinity, or,
/// where signs differ, NaN.
inline std::string difference(const Stats& got, const Stats& want) {
  std::string text;
  const auto note = [&](bool is_same, const char* name, double a, double b) {
    if (is_same) return;
    char line[128];
    std::snprintf(line, sizeof(line), "%s: got %.17g, want %.17g\n", name, a, b);
    text += line;
  };
  const auto equal = [&](const char* name, auto a, auto b) {
    note(a == b, name, static_cast<double>(a), static_cast<double>(b));
  };
  const auto sum = [&](const char* name, double a, double b, double magnitudes) {
    const bool is_same =
        std::isfinite(b) ? std::fabs(a - b) <= 1e-12 * magnitudes : !std::isfinite(a);
    note(is_same, name, a, b);
  };
  equal("numel", got.numel, want.numel);
  equal("unequal_bits", got.unequal_bits, want.unequal_bits);
  equal("unequal_values", got.unequal_values, want.unequal_values);
  equal("nan_reference", got.nan_reference, want.nan_reference);
  equal("nan_actual", got.nan_actual, want.nan_actual);
  equal("inf_reference", got.inf_reference, want.inf_reference);
  equal("inf_actual", got.inf_actual, want.inf_actual);
  equal("nonfinite_mismatch", got.nonfinite_mismatch, want.nonfinite_mismatch);
  equal("first_unequal", got.first_unequal, want.first_unequal);
  equal("worst", got.worst, want.worst);
  equal("max_abs", got.max_abs, want.max_abs);
  equal("max_ulp", got.max_ulp, want.max_ulp);
  equal("max_abs_reference", got.max_abs_reference, want.max_abs_reference);
  sum("sum_sq_reference", got.sum_sq_reference, want.sum_sq_reference, want.sum_sq_reference);
  sum("sum_sq_actual", got.sum_sq_actual, want.sum_sq_actual, want.sum_sq_actual);
  sum("sum_sq_diff", got.sum_sq_diff, want.sum_sq_diff, want.sum_sq_diff);
  sum("sum_abs_diff", got.sum_abs_diff, want.sum_abs_diff, want.sum_abs_diff);
  sum("sum_diff", got.sum_diff, want.sum_diff, want.sum_abs_diff);
  sum("dot", got.dot, want.dot, std::sqrt(want.sum_sq_reference) * std::sqrt(want.sum_sq_actual));
  return text;
}

}  // namespace isoshard
