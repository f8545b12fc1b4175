// SPDX-License-Identifier: Apache-2.0
/// Statistics of two runs: integers one by one, floats through the loops that this CPU runs
/// fastest; merging; digests.
#include "harness/stats/stats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "harness/stats/stats_formulas.h"
#include "harness/stats/stats_kernels.h"

#include <xxhash.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace isoshard {
namespace {

/// Rounding to nearest with subnormals kept, whatever a library left behind.
class PlainFloatingPoint {
 public:
#if defined(__x86_64__)
  PlainFloatingPoint() noexcept : saved_(_mm_getcsr()) {
    _mm_setcsr(0x1f80);
  }
  ~PlainFloatingPoint() {
    _mm_setcsr(saved_);
  }

 private:
  unsigned saved_;
#endif
};

std::int64_t integer_at(const std::byte* data, Dtype dtype, std::int64_t i) noexcept {
  const auto read = [&]<class T>(T value) {
    std::memcpy(&value, data + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    return static_cast<std::int64_t>(value);
  };
  switch (dtype) {
    case Dtype::kInt64:
      return read(std::int64_t{});
    case Dtype::kInt32:
      return read(std::int32_t{});
    case Dtype::kInt16:
      return read(std::int16_t{});
    case Dtype::kInt8:
      return read(std::int8_t{});
    case Dtype::kUint8:
      return read(std::uint8_t{});
    default:
      return data[i] == std::byte{0} ? 0 : 1;
  }
}

/// Integers beyond 2^53 are compared exactly: the difference is taken before anything is rounded to
/// fp64.
void accumulate_integers(Stats& stats, const FloatRun& run, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (run.selected != nullptr && run.selected[i] == 0) continue;
    const std::int64_t r = integer_at(run.reference, run.reference_dtype, i);
    const std::int64_t a = integer_at(run.actual, run.actual_dtype, i);
    const double magnitude =
        static_cast<double>(r > a ? static_cast<std::uint64_t>(r) - static_cast<std::uint64_t>(a)
                                  : static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(r));
    const auto rd = static_cast<double>(r);
    const auto ad = static_cast<double>(a);
    ++stats.numel;
    if (r != a) {
      ++stats.unequal_bits;
      ++stats.unequal_values;
      if (stats.first_unequal < 0 || run.index + i < stats.first_unequal)
        stats.first_unequal = run.index + i;
    }
    if (magnitude > stats.max_abs) {
      stats.max_abs = magnitude;
      stats.worst = run.index + i;
    }
    stats.max_ulp = std::max(stats.max_ulp, magnitude);
    stats.max_abs_reference = std::max(stats.max_abs_reference, std::fabs(rd));
    stats.sum_sq_reference += rd * rd;
    stats.sum_sq_actual += ad * ad;
    stats.sum_sq_diff += magnitude * magnitude;
    stats.dot += rd * ad;
    stats.sum_abs_diff += magnitude;
    stats.sum_diff += r > a ? -magnitude : magnitude;
  }
}

}  // namespace

double Stats::relative_error() const noexcept {
  if (sum_sq_diff == 0) return 0;
  if (sum_sq_reference == 0) return std::numeric_limits<double>::infinity();
  return std::sqrt(sum_sq_diff / sum_sq_reference);
}

double Stats::scale() const noexcept {
  return sum_sq_reference == 0 ? 1 : dot / sum_sq_reference;
}

double Stats::cosine() const noexcept {
  if (sum_sq_reference == 0 && sum_sq_actual == 0) return 1;
  if (sum_sq_reference == 0 || sum_sq_actual == 0) return 0;
  return dot / (std::sqrt(sum_sq_reference) * std::sqrt(sum_sq_actual));
}

std::span<const StatsKernels* const> stats_kernels() noexcept {
  static const StatsKernels* const all[] = {
    &kPlainStatsKernels,
#if defined(__x86_64__)
    &kAvx2StatsKernels,
    &kAvx512StatsKernels,
#endif
  };
  static const std::size_t count = [] {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 1;
    const bool has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return has_avx512 ? 3 : 2;
#else
    return 1;
#endif
  }();
  return {all, count};
}

void accumulate_with(const StatsKernels& kernels, Stats& stats, const std::byte* reference,
                     Dtype reference_dtype, const std::byte* actual, Dtype actual_dtype,
                     std::int64_t count, std::int64_t index, double grad_scale,
                     const std::uint8_t* selected) {
  const PlainFloatingPoint plain;
  const FloatRun run{reference, actual, reference_dtype, actual_dtype, index, grad_scale, selected};
  if (!is_floating(reference_dtype) && !is_floating(actual_dtype) && grad_scale == 1.0) {
    accumulate_integers(stats, run, count);
  } else {
    accumulate_floats(kernels, stats, run, count);
  }
}

void accumulate(Stats& stats, const std::byte* reference, Dtype reference_dtype,
                const std::byte* actual, Dtype actual_dtype, std::int64_t count, std::int64_t index,
                double grad_scale, const std::uint8_t* selected) {
  static const StatsKernels& fastest = *stats_kernels().back();
  accumulate_with(fastest, stats, reference, reference_dtype, actual, actual_dtype, count, index,
                  grad_scale, selected);
}

double value_at(const std::byte* data, Dtype dtype, std::int64_t position) noexcept {
  double value = 0;
  widen(kPlainStatsKernels, data + position * static_cast<std::int64_t>(size_of(dtype)), dtype, 1,
        &value);
  return value;
}

void merge(Stats& a, const Stats& b) noexcept {
  merge_into(a, b);
}

std::uint64_t digest_of(const std::byte* data, std::size_t bytes, std::uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

}  // namespace isoshard
