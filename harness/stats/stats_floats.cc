// SPDX-License-Identifier: Apache-2.0
/// Comparing block by block: in the tensors' own dtype where that is accurate, else widened to
/// fp64.
///
/// A *narrow* block holds two tensors of fp32 or of bf16, finite and in range. Its first pass sums
/// the squares of the reference and sees whether any bit differs; only then a second pass looks at
/// the differences, in fp32 (exact for elements within a factor of two, else rounded once). If the
/// tensors are *close*, sums over actual follow from those; if they are *apart*, a third pass makes
/// them. The lanes of the sums are told in stats_loops.h. Every other block is *wide*: its elements
/// are converted to fp64, non-finite ones counted and taken out. Which one a block is follows from
/// its values, so it is the same on every CPU.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/base/float_bits.h"
#include "harness/stats/stats_formulas.h"
#include "harness/stats/stats_kernels.h"

namespace isoshard {
namespace {

// a tensor up to this size may come from a cache
constexpr std::int64_t kCachedBytes = std::int64_t{8} << 20;
// three blocks of doubles stay in the L1 cache
constexpr std::int64_t kWideBlock = 512;
static_assert(kWideBlock % kWideLanes == 0,
              "a last block is padded to whole lanes inside its buffer");

template <class T>
void widen_as(const std::byte* from, std::int64_t count, double* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, from + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    to[i] = static_cast<double>(value);
  }
}

/// Neighbors first, then their sums, and so on: lane l with lane l + half.
template <std::size_t kLanes>
double total(const double (&lanes)[kLanes]) noexcept {
  std::array<double, kLanes> v;
  std::copy_n(lanes, kLanes, v.begin());
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) v[lane] += v[lane + half];
  }
  return v[0];
}
template <std::size_t kLanes>
std::int64_t total(const std::int64_t (&lanes)[kLanes]) noexcept {
  std::int64_t sum = 0;
  for (const std::int64_t x : lanes) sum += x;
  return sum;
}
double largest(const double (&lanes)[kWideLanes]) noexcept {
  return *std::max_element(std::begin(lanes), std::end(lanes));
}

/// Sums of one run. Maxima and positions go straight to its Stats.
struct RunSums {
  StatsLanes sq_close_reference = {};  ///< of equal and close blocks
  DifferenceSums close;
  ApartSums apart;
  DifferenceSums apart_differences;
  WideSums wide;
};

/// Counts the non-finite elements of a block and puts zeros in their place, so that they add
/// nothing to any sum.
void take_out_nonfinite(Stats& stats, const FloatRun& run, std::int64_t begin, std::int64_t count,
                        double* reference, double* actual) {
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
      if (stats.first_unequal < 0 || run.index + begin + i < stats.first_unequal)
        stats.first_unequal = run.index + begin + i;
    }
    const bool same_bits =
        run.same_dtype_unscaled()
            ? std::memcmp(run.reference + (begin + i) * size_r, run.actual + (begin + i) * size_r,
                          static_cast<std::size_t>(size_r)) == 0
            : std::bit_cast<std::uint64_t>(r) == std::bit_cast<std::uint64_t>(a);
    stats.unequal_bits += same_bits ? 0 : 1;
    reference[i] = 0;
    actual[i] = 0;
  }
}

/// Finds the positions that the block's sums only counted.
void locate(Stats& stats, const FloatRun& run, std::int64_t begin, std::int64_t count,
            const double* reference, const double* actual, double block_max, bool has_unequal) {
  if (has_unequal) {
    for (std::int64_t i = 0; i < count; ++i) {
      if (reference[i] == actual[i]) continue;
      if (stats.first_unequal < 0 || run.index + begin + i < stats.first_unequal)
        stats.first_unequal = run.index + begin + i;
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

/// Elements [block_begin, block_end) of the run in fp64.
void add_wide_block(const StatsKernels& kernels, Stats& stats, WideSums& sums, const FloatRun& run,
                    std::int64_t block_begin, std::int64_t block_end) {
  const Steps steps = steps_of(run.reference_dtype, run.actual_dtype);
  const std::int64_t min_bits = static_cast<std::int64_t>(steps.min_exponent + 1023) << 52;
  const double ulp_factor = power_of_two(steps.fraction_bits);
  alignas(64) std::array<double, kWideBlock> reference;
  alignas(64) std::array<double, kWideBlock> actual;
  const auto size_r = static_cast<std::int64_t>(size_of(run.reference_dtype));
  const auto size_a = static_cast<std::int64_t>(size_of(run.actual_dtype));
  for (std::int64_t begin = block_begin; begin < block_end; begin += kWideBlock) {
    const std::int64_t count = std::min(kWideBlock, block_end - begin);
    widen(kernels, run.reference + begin * size_r, run.reference_dtype, count, reference.data());
    widen(kernels, run.actual + begin * size_a, run.actual_dtype, count, actual.data());
    if (run.grad_scale != 1.0) kernels.divide(actual.data(), count, run.grad_scale);
    stats.numel += count;
    if (run.selected != nullptr) {
      for (std::int64_t i = 0; i < count; ++i) {
        if (run.selected[begin + i] != 0) continue;
        reference[static_cast<std::size_t>(i)] = 0;
        actual[static_cast<std::size_t>(i)] = 0;
        --stats.numel;
      }
    }
    if (!kernels.all_finite(reference.data(), count) || !kernels.all_finite(actual.data(), count)) {
      take_out_nonfinite(stats, run, begin, count, reference.data(), actual.data());
    }
    const std::int64_t padded = (count + kWideLanes - 1) / kWideLanes * kWideLanes;
    std::fill(reference.begin() + count, reference.begin() + padded, 0.0);
    std::fill(actual.begin() + count, actual.begin() + padded, 0.0);
    const std::int64_t unequal_before = total(sums.unequal_values);
    const double max_before = largest(sums.max_abs);
    kernels.add_wide(sums, reference.data(), actual.data(), padded, min_bits, ulp_factor);
    const double max_now = largest(sums.max_abs);
    locate(stats, run, begin, count, reference.data(), actual.data(),
           max_now > max_before ? max_now : 0, total(sums.unequal_values) != unequal_before);
  }
}

/// The element as fp32: exact for fp32 and bf16.
float float_at(const std::byte* data, Dtype dtype, std::int64_t i) noexcept {
  if (dtype == Dtype::kBFloat16) {
    std::uint16_t bits;
    std::memcpy(&bits, data + i * 2, 2);
    return bf16_to_float(bits);
  }
  float value;
  std::memcpy(&value, data + i * 4, 4);
  return value;
}

double largest_steps(const FloatRun& run, std::int64_t begin, std::int64_t end) noexcept {
  const Steps steps = steps_of(run.reference_dtype, run.actual_dtype);
  double result = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const float r = float_at(run.reference, run.reference_dtype, i);
    const float d = float_at(run.actual, run.actual_dtype, i) - r;
    result = std::max(result, steps_between(r, d, steps));
  }
  return result;
}

/// Positions and steps of a narrow block, looked for only if they change what is known.
void locate_narrow(Stats& stats, const FloatRun& run, std::int64_t begin, std::int64_t end,
                   const BlockOfDifferences& block) {
  const auto difference = [&](std::int64_t i) {
    return std::fabs(float_at(run.actual, run.actual_dtype, i) -
                     float_at(run.reference, run.reference_dtype, i));
  };
  if (block.unequal_values != 0 &&
      (stats.first_unequal < 0 || run.index + begin < stats.first_unequal)) {
    std::int64_t i = begin;
    while (difference(i) == 0) ++i;
    if (stats.first_unequal < 0 || run.index + i < stats.first_unequal)
      stats.first_unequal = run.index + i;
  }
  const float max_diff = std::bit_cast<float>(block.max_diff);
  if (static_cast<double>(max_diff) > stats.max_abs) {
    std::int64_t i = begin;
    while (difference(i) != max_diff) ++i;
    stats.max_abs = max_diff;
    stats.worst = run.index + i;
  }
  if (block.max_diff != 0 &&
      steps_of_key(block.max_key, steps_of(run.reference_dtype, run.actual_dtype).fraction_bits) >
          stats.max_ulp) {
    stats.max_ulp = std::max(stats.max_ulp, largest_steps(run, begin, end));
  }
}

void add(StatsLanes& to, const StatsLanes& from) noexcept {
  for (int lane = 0; lane < kStatsLanes; ++lane) to[lane] += from[lane];
}
void add(DifferenceSums& to, const DifferenceSums& from) noexcept {
  add(to.sq_diff, from.sq_diff);
  add(to.reference_diff, from.reference_diff);
  add(to.abs_diff, from.abs_diff);
  add(to.diff, from.diff);
}

/// The two tensors of a block, padded with zeros to whole steps.
class NarrowBlock {
 public:
  NarrowBlock(const FloatRun& run, std::int64_t begin, std::int64_t end) {
    const auto size = static_cast<std::int64_t>(size_of(run.reference_dtype));
    reference = run.reference + begin * size;
    actual = run.actual + begin * size;
    const std::int64_t bytes = (end - begin) * size;
    steps = (bytes + kStatsStepBytes - 1) / kStatsStepBytes;
    if (bytes == steps * kStatsStepBytes) return;
    reference = pad(reference, bytes, padded_.data());
    actual = pad(actual, bytes, padded_.data() + kStatsBlockBytes);
  }
  NarrowBlock(const NarrowBlock&) = delete;
  NarrowBlock& operator=(const NarrowBlock&) = delete;

  const std::byte* reference;
  const std::byte* actual;
  std::int64_t steps;

 private:
  const std::byte* pad(const std::byte* from, std::int64_t bytes, std::byte* to) const noexcept {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
    std::memset(to + bytes, 0, static_cast<std::size_t>(steps * kStatsStepBytes - bytes));
    return to;
  }
  std::array<std::byte, 2 * kStatsBlockBytes> padded_;
};

/// Whether blocks differ is mostly as it was in the block before, and whether they come from memory
/// follows from their number. Neither changes a bit of what is said of a block.
struct Expectation {
  bool is_from_memory = false;
  bool is_unequal = false;
};

/// Adds elements [begin, end) in their own dtype, or changes nothing and returns false if they have
/// to be widened.
bool add_narrow_block(const NarrowKernels& kernels, Stats& stats, RunSums& sums,
                      const FloatRun& run, std::int64_t begin, std::int64_t end,
                      Expectation& expected) {
  const NarrowBlock block(run, begin, end);
  StatsLanes squares;
  std::memcpy(squares, sums.sq_close_reference, sizeof(squares));
  DifferenceSums differences;
  BlockOfReference first;
  BlockOfDifferences second;
  if (expected.is_unequal) {
    second = kernels.both(block.reference, block.actual, block.steps, squares, differences, first);
  } else {
    first = (expected.is_from_memory ? kernels.first_from_memory : kernels.first)(
        block.reference, block.actual, block.steps, squares);
    if (!first.is_equal)
      second = kernels.second(block.reference, block.actual, block.steps, differences);
  }
  expected.is_unequal = !first.is_equal;
  if (first.is_equal) {
    // Squares of fp32 are summed in fp64, where no finite one is out of range.
    const bool is_fp32 = run.reference_dtype == Dtype::kFloat32;
    if (is_fp32 ? first.max_reference >= 0x7f800000 : !in_range(first.max_reference)) return false;
    std::memcpy(sums.sq_close_reference, squares, sizeof(squares));
  } else {
    if (!in_range(first.max_reference) || !in_range(second.max_diff)) return false;
    if (are_close(second.max_diff, first.max_reference)) {
      std::memcpy(sums.sq_close_reference, squares, sizeof(squares));
      add(sums.close, differences);
    } else {
      kernels.third(block.reference, block.actual, block.steps, sums.apart);
      add(sums.apart_differences, differences);
    }
    stats.unequal_bits += second.unequal_bits;
    stats.unequal_values += second.unequal_values;
    locate_narrow(stats, run, begin, end, second);
  }
  stats.numel += end - begin;
  stats.max_abs_reference = std::max(
      stats.max_abs_reference, static_cast<double>(std::bit_cast<float>(first.max_reference)));
  return true;
}

}  // namespace

Steps steps_of(Dtype reference_dtype, Dtype actual_dtype) noexcept {
  switch (unit_roundoff(reference_dtype) >= unit_roundoff(actual_dtype) ? reference_dtype
                                                                        : actual_dtype) {
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

void widen(const StatsKernels& kernels, const std::byte* from, Dtype dtype, std::int64_t count,
           double* to) {
  switch (dtype) {
    case Dtype::kFloat64:
      std::memcpy(to, from, static_cast<std::size_t>(count) * 8);
      return;
    case Dtype::kFloat32:
      kernels.widen_fp32(from, count, to);
      return;
    case Dtype::kBFloat16:
      kernels.widen_bf16(from, count, to);
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

void accumulate_floats(const StatsKernels& kernels, Stats& stats, const FloatRun& run,
                       std::int64_t count) {
  RunSums sums;
  const bool may_be_narrow =
      run.same_dtype_unscaled() && run.selected == nullptr &&
      (run.reference_dtype == Dtype::kFloat32 || run.reference_dtype == Dtype::kBFloat16);
  const NarrowKernels& narrow =
      run.reference_dtype == Dtype::kFloat32 ? kernels.fp32 : kernels.bf16;
  const auto size = static_cast<std::int64_t>(size_of(run.reference_dtype));
  const std::int64_t block =
      may_be_narrow ? kStatsBlockBytes / size : std::max<std::int64_t>(count, 1);
  Expectation expected{.is_from_memory = count * size > kCachedBytes};
  for (std::int64_t begin = 0; begin < count; begin += block) {
    const std::int64_t end = std::min(begin + block, count);
    if (may_be_narrow && add_narrow_block(narrow, stats, sums, run, begin, end, expected)) continue;
    add_wide_block(kernels, stats, sums.wide, run, begin, end);
  }
  const double sq_close = total(sums.sq_close_reference);
  const double close_diff = total(sums.close.sq_diff);
  const double reference_diff = total(sums.close.reference_diff);
  stats.unequal_bits += total(sums.wide.unequal_bits);
  stats.unequal_values += total(sums.wide.unequal_values);
  stats.sum_sq_reference +=
      sq_close + total(sums.apart.sq_reference) + total(sums.wide.sq_reference);
  stats.sum_sq_actual += sq_close + 2 * reference_diff + close_diff + total(sums.apart.sq_actual) +
                         total(sums.wide.sq_actual);
  stats.sum_sq_diff +=
      close_diff + total(sums.apart_differences.sq_diff) + total(sums.wide.sq_diff);
  stats.dot += sq_close + reference_diff + total(sums.apart.dot) + total(sums.wide.dot);
  stats.sum_abs_diff += total(sums.close.abs_diff) + total(sums.apart_differences.abs_diff) +
                        total(sums.wide.abs_diff);
  stats.sum_diff +=
      total(sums.close.diff) + total(sums.apart_differences.diff) + total(sums.wide.diff);
  stats.max_abs_reference = std::max(stats.max_abs_reference, largest(sums.wide.max_reference));
  stats.max_ulp = std::max(stats.max_ulp, largest(sums.wide.max_ulp));
}

}  // namespace isoshard
