// SPDX-License-Identifier: Apache-2.0
/// The comparing kernels: blocks are widened to fp64, non-finite elements counted and taken out, the rest summed in fixed lanes.
#include "harness/compare/stats.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/float_bits.h"

#include <xxhash.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The same source for every CPU: wider registers hold more of the same eight lanes, and nothing is fused
// (-ffp-contract=off), so all clones give the same bits. Sanitizers run before resolvers may.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define ISOSHARD_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define ISOSHARD_CLONES
#endif

namespace isoshard {
namespace {

constexpr std::int64_t kBlock = 512;  // three blocks of doubles stay in the L1 cache
constexpr int kLanes = 8;
static_assert(kBlock % kLanes == 0, "a last block is padded to whole lanes inside its buffer");

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

struct Sums {
  std::array<double, kLanes> sq_reference{}, sq_actual{}, sq_diff{}, dot{}, abs_diff{}, max_abs{}, max_reference{}, max_ulp{};
  std::array<std::int64_t, kLanes> unequal_bits{}, unequal_values{};
};

/// How large one step of a dtype is: 2^(e - fraction_bits) for a value of exponent e, e never below min_exponent.
struct Steps {
  int fraction_bits = 0;
  int min_exponent = 0;
};

Steps steps_of(Dtype dtype) noexcept {
  switch (dtype) {
    case Dtype::kFloat64:
      return {52, -1022};
    case Dtype::kFloat32:
      return {23, -126};
    case Dtype::kBFloat16:
      return {7, -126};
    case Dtype::kFloat16:
      return {10, -14};
    default:
      return {0, 0};  // integers: not used, their step is 1
  }
}

ISOSHARD_CLONES void widen_float(const std::byte* from, std::int64_t count, double* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, from + i * 4, 4);
    to[i] = static_cast<double>(value);
  }
}

ISOSHARD_CLONES void widen_bf16(const std::byte* from, std::int64_t count, double* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, from + i * 2, 2);
    to[i] = static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16));
  }
}

template <class T>
void widen_as(const std::byte* from, std::int64_t count, double* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    to[i] = static_cast<double>(value);
  }
}

void widen(const std::byte* from, Dtype dtype, std::int64_t count, double* to) {
  switch (dtype) {
    case Dtype::kFloat64:
      std::memcpy(to, from, static_cast<std::size_t>(count) * 8);
      return;
    case Dtype::kFloat32:
      widen_float(from, count, to);
      return;
    case Dtype::kBFloat16:
      widen_bf16(from, count, to);
      return;
    case Dtype::kFloat16:
      for (std::int64_t i = 0; i < count; ++i) {
        std::uint16_t bits;
        std::memcpy(&bits, from + i * 2, 2);
        to[i] = static_cast<double>(fp16_to_float(bits));
      }
      return;
    case Dtype::kInt64:
      widen_as<std::int64_t>(from, count, to);
      return;
    case Dtype::kInt32:
      widen_as<std::int32_t>(from, count, to);
      return;
    case Dtype::kInt16:
      widen_as<std::int16_t>(from, count, to);
      return;
    case Dtype::kInt8:
      widen_as<std::int8_t>(from, count, to);
      return;
    case Dtype::kUint8:
      widen_as<std::uint8_t>(from, count, to);
      return;
    case Dtype::kBool:
      for (std::int64_t i = 0; i < count; ++i) to[i] = from[i] == std::byte{0} ? 0.0 : 1.0;
      return;
  }
}

ISOSHARD_CLONES void divide(double* values, std::int64_t count, double divisor) {
  for (std::int64_t i = 0; i < count; ++i) values[i] /= divisor;
}

/// Whether every element has an exponent below the one of infinities and NaNs.
ISOSHARD_CLONES bool all_finite(const double* values, std::int64_t count) {
  std::uint64_t bad = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint64_t>(values[i]) & 0x7fffffffffffffffULL;
    bad |= bits >= 0x7ff0000000000000ULL ? 1U : 0U;
  }
  return bad == 0;
}

/// `count` is a multiple of kLanes and everything is finite. Element i belongs to lane i mod 8.
ISOSHARD_CLONES void add_block(Sums& sums, const double* reference, const double* actual, std::int64_t count, std::int64_t min_bits,
                               double ulp_factor) {
  Sums s = sums;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto l = static_cast<std::size_t>(lane);
      const double r = reference[i + lane];
      const double a = actual[i + lane];
      const double d = a - r;
      const double abs_d = std::fabs(d);
      const double abs_r = std::fabs(r);
      s.sq_reference[l] += r * r;
      s.sq_actual[l] += a * a;
      s.sq_diff[l] += d * d;
      s.dot[l] += r * a;
      s.abs_diff[l] += abs_d;
      s.max_abs[l] = abs_d > s.max_abs[l] ? abs_d : s.max_abs[l];
      s.max_reference[l] = abs_r > s.max_reference[l] ? abs_r : s.max_reference[l];
      const auto r_bits = std::bit_cast<std::int64_t>(r);
      const auto a_bits = std::bit_cast<std::int64_t>(a);
      s.unequal_bits[l] += r_bits != a_bits ? 1 : 0;
      s.unequal_values[l] += r != a ? 1 : 0;
      // 2^-e of the reference: the exponent field mirrored at the bias. Both factors are representable.
      std::int64_t exponent = r_bits & 0x7ff0000000000000LL;
      exponent = exponent > min_bits ? exponent : min_bits;
      const double inverse = std::bit_cast<double>(0x7fe0000000000000LL - exponent);
      const double ulps = abs_d * inverse * ulp_factor;
      s.max_ulp[l] = ulps > s.max_ulp[l] ? ulps : s.max_ulp[l];
    }
  }
  sums = s;
}

double total(const std::array<double, kLanes>& v) noexcept {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
double largest(const std::array<double, kLanes>& v) noexcept {
  return *std::max_element(v.begin(), v.end());
}
std::int64_t total(const std::array<std::int64_t, kLanes>& v) noexcept {
  std::int64_t sum = 0;
  for (const std::int64_t x : v) sum += x;
  return sum;
}

struct Run {
  const std::byte* reference;
  const std::byte* actual;
  Dtype reference_dtype, actual_dtype;
  std::int64_t index;
  double grad_scale;
  const std::uint8_t* selected;
  bool same_dtype_unscaled;
};

/// Counts the non-finite elements of a block and puts zeros in their place, so that they add nothing to any sum.
void take_out_nonfinite(Stats& stats, const Run& run, std::int64_t begin, std::int64_t count, double* reference, double* actual) {
  const auto size_r = static_cast<std::int64_t>(size_of(run.reference_dtype));
  for (std::int64_t i = 0; i < count; ++i) {
    const double r = reference[i];
    const double a = actual[i];
    if (std::isfinite(r) && std::isfinite(a)) continue;
    stats.nan_reference += std::isnan(r) ? 1 : 0;
    stats.nan_actual += std::isnan(a) ? 1 : 0;
    stats.inf_reference += std::isinf(r) ? 1 : 0;
    stats.inf_actual += std::isinf(a) ? 1 : 0;
    const bool same = (std::isnan(r) && std::isnan(a)) || r == a;
    if (!same) {
      ++stats.nonfinite_mismatch;
      ++stats.unequal_values;
      if (stats.first_unequal < 0 || run.index + begin + i < stats.first_unequal) stats.first_unequal = run.index + begin + i;
    }
    const bool same_bits = run.same_dtype_unscaled ? std::memcmp(run.reference + (begin + i) * size_r, run.actual + (begin + i) * size_r,
                                                                 static_cast<std::size_t>(size_r)) == 0
                                                   : std::bit_cast<std::uint64_t>(r) == std::bit_cast<std::uint64_t>(a);
    stats.unequal_bits += same_bits ? 0 : 1;
    reference[i] = 0;
    actual[i] = 0;
  }
}

/// Finds the positions that the block's sums only counted.
void locate(Stats& stats, const Run& run, std::int64_t begin, std::int64_t count, const double* reference, const double* actual,
            double block_max, bool has_unequal) {
  if (has_unequal) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (reference[i] == actual[i]) continue;
      if (stats.first_unequal < 0 || run.index + begin + i < stats.first_unequal) stats.first_unequal = run.index + begin + i;
      break;
    }
  }
  if (block_max > stats.max_abs) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (std::fabs(actual[i] - reference[i]) != block_max) continue;
      stats.max_abs = block_max;
      stats.worst = run.index + begin + i;
      break;
    }
  }
}

void accumulate_floats(Stats& stats, const Run& run, std::int64_t total_count) {
  const Steps steps =
      steps_of(unit_roundoff(run.reference_dtype) >= unit_roundoff(run.actual_dtype) ? run.reference_dtype : run.actual_dtype);
  const std::int64_t min_bits = static_cast<std::int64_t>(steps.min_exponent + 1023) << 52;
  const double ulp_factor = std::ldexp(1.0, steps.fraction_bits);
  alignas(64) std::array<double, kBlock> reference;
  alignas(64) std::array<double, kBlock> actual;
  Sums sums;
  const auto size_r = static_cast<std::int64_t>(size_of(run.reference_dtype));
  const auto size_a = static_cast<std::int64_t>(size_of(run.actual_dtype));
  for (std::int64_t begin = 0; begin < total_count; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, total_count - begin);
    widen(run.reference + begin * size_r, run.reference_dtype, count, reference.data());
    widen(run.actual + begin * size_a, run.actual_dtype, count, actual.data());
    if (run.grad_scale != 1.0) divide(actual.data(), count, run.grad_scale);
    stats.numel += count;
    if (run.selected != nullptr) {
      for (std::int64_t i = 0; i < count; ++i) {
        if (run.selected[begin + i] != 0) continue;
        reference[static_cast<std::size_t>(i)] = 0;
        actual[static_cast<std::size_t>(i)] = 0;
        --stats.numel;
      }
    }
    if (!all_finite(reference.data(), count) || !all_finite(actual.data(), count)) {
      take_out_nonfinite(stats, run, begin, count, reference.data(), actual.data());
    }
    const std::int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    std::fill(reference.begin() + count, reference.begin() + padded, 0.0);
    std::fill(actual.begin() + count, actual.begin() + padded, 0.0);
    const std::int64_t unequal_before = total(sums.unequal_values);
    const double max_before = largest(sums.max_abs);
    add_block(sums, reference.data(), actual.data(), padded, min_bits, ulp_factor);
    const double max_now = largest(sums.max_abs);
    locate(stats, run, begin, count, reference.data(), actual.data(), max_now > max_before ? max_now : 0,
           total(sums.unequal_values) != unequal_before);
  }
  stats.unequal_bits += total(sums.unequal_bits);
  stats.unequal_values += total(sums.unequal_values);
  stats.sum_sq_reference += total(sums.sq_reference);
  stats.sum_sq_actual += total(sums.sq_actual);
  stats.sum_sq_diff += total(sums.sq_diff);
  stats.dot += total(sums.dot);
  stats.sum_abs_diff += total(sums.abs_diff);
  stats.max_abs_reference = std::max(stats.max_abs_reference, largest(sums.max_reference));
  stats.max_ulp = std::max(stats.max_ulp, largest(sums.max_ulp));
}

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

/// Integers beyond 2^53 are compared exactly: the difference is taken before anything is rounded to fp64.
void accumulate_integers(Stats& stats, const Run& run, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    if (run.selected != nullptr && run.selected[i] == 0) continue;
    const std::int64_t r = integer_at(run.reference, run.reference_dtype, i);
    const std::int64_t a = integer_at(run.actual, run.actual_dtype, i);
    const double magnitude = static_cast<double>(r > a ? static_cast<std::uint64_t>(r) - static_cast<std::uint64_t>(a)
                                                       : static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(r));
    const auto rd = static_cast<double>(r);
    const auto ad = static_cast<double>(a);
    ++stats.numel;
    if (r != a) {
      ++stats.unequal_bits;
      ++stats.unequal_values;
      if (stats.first_unequal < 0 || run.index + i < stats.first_unequal) stats.first_unequal = run.index + i;
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

void accumulate(Stats& stats, const std::byte* reference, Dtype reference_dtype, const std::byte* actual, Dtype actual_dtype,
                std::int64_t count, std::int64_t index, double grad_scale, const std::uint8_t* selected) {
  const PlainFloatingPoint plain;
  const Run run{reference, actual,     reference_dtype, actual_dtype,
                index,     grad_scale, selected,        reference_dtype == actual_dtype && grad_scale == 1.0};
  if (!is_floating(reference_dtype) && !is_floating(actual_dtype) && grad_scale == 1.0) {
    accumulate_integers(stats, run, count);
  } else {
    accumulate_floats(stats, run, count);
  }
}

double value_at(const std::byte* data, Dtype dtype, std::int64_t position) noexcept {
  double value = 0;
  widen(data + position * static_cast<std::int64_t>(size_of(dtype)), dtype, 1, &value);
  return value;
}

void merge(Stats& a, const Stats& b) noexcept {
  a.numel += b.numel;
  a.unequal_bits += b.unequal_bits;
  a.unequal_values += b.unequal_values;
  a.nan_reference += b.nan_reference;
  a.nan_actual += b.nan_actual;
  a.inf_reference += b.inf_reference;
  a.inf_actual += b.inf_actual;
  a.nonfinite_mismatch += b.nonfinite_mismatch;
  if (b.max_abs > a.max_abs || (b.max_abs == a.max_abs && b.worst >= 0 && (a.worst < 0 || b.worst < a.worst))) a.worst = b.worst;
  a.max_abs = std::max(a.max_abs, b.max_abs);
  a.max_ulp = std::max(a.max_ulp, b.max_ulp);
  a.sum_sq_reference += b.sum_sq_reference;
  a.sum_sq_actual += b.sum_sq_actual;
  a.sum_sq_diff += b.sum_sq_diff;
  a.dot += b.dot;
  a.sum_abs_diff += b.sum_abs_diff;
  a.max_abs_reference = std::max(a.max_abs_reference, b.max_abs_reference);
  if (b.first_unequal >= 0 && (a.first_unequal < 0 || b.first_unequal < a.first_unequal)) a.first_unequal = b.first_unequal;
}

std::uint64_t digest_of(const std::byte* data, std::size_t bytes, std::uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(data, bytes, seed);
}

}  // namespace isoshard
