// SPDX-License-Identifier: Apache-2.0
/// The loops under accumulate(), once per instruction set; internal to stats.
///
/// Rounding. Differences of two fp32 or two bf16 tensors are taken in fp32: exact where the
/// elements are within a factor of two, else rounded once. What is summed of them, and the squares
/// of bf16, has a relative error of 2^-17 at most (128 roundings of a lane in fp32, then fp64);
/// squares of fp32, and everything of wide blocks, are summed in fp64. dot - sum_sq_reference is as
/// exact as the differences are.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "harness/stats/stats.h"

namespace isoshard {

inline constexpr int kStatsLanes = 32;
inline constexpr int kWideLanes = 8;
/// Elements of a block are read in groups of this many bytes per tensor: what is left over is
/// padded with zeros.
inline constexpr std::int64_t kStatsStepBytes = 128;
/// Both tensors' blocks stay in the first-level cache between the two passes.
inline constexpr std::int64_t kStatsBlockBytes = 8192;

using StatsLanes = double[kStatsLanes];

/// Sums of differences over narrow blocks (see stats_floats.cc).
struct DifferenceSums {
  StatsLanes sq_diff = {};
  StatsLanes reference_diff = {};  ///< reference * (actual - reference)
  StatsLanes abs_diff = {};
  StatsLanes diff = {};
};

/// Sums of narrow blocks whose tensors are far apart.
struct ApartSums {
  StatsLanes sq_reference = {};
  StatsLanes sq_actual = {};
  StatsLanes dot = {};
};

/// What the first pass over a block says: whether anything differs, and the largest magnitude as
/// fp32 bits.
struct BlockOfReference {
  bool is_equal = true;
  std::int32_t max_reference = 0;
};

/// What the second pass says, of differences in fp32. `max_key` is the largest abs(difference) in
/// steps of the reference's binade, as bits of abs(difference) less the exponent field of the
/// reference; never too small, too large only where a difference is subnormal.
struct BlockOfDifferences {
  std::int32_t max_diff = 0;
  std::int32_t max_key = 0;
  std::int64_t unequal_bits = 0;
  std::int64_t unequal_values = 0;
};

/// Sums of elements widened to fp64. Element i belongs to lane i mod kWideLanes.
struct WideSums {
  double sq_reference[kWideLanes] = {}, sq_actual[kWideLanes] = {}, sq_diff[kWideLanes] = {},
         dot[kWideLanes] = {};
  double abs_diff[kWideLanes] = {}, diff[kWideLanes] = {}, max_abs[kWideLanes] = {},
         max_reference[kWideLanes] = {}, max_ulp[kWideLanes] = {};
  std::int64_t unequal_bits[kWideLanes] = {}, unequal_values[kWideLanes] = {};
};

/// The passes over a block of one dtype. `steps` counts kStatsStepBytes of each tensor. `both` is
/// first and second in one.
struct NarrowKernels {
  using First = BlockOfReference (*)(const std::byte* reference, const std::byte* actual,
                                     std::int64_t steps, StatsLanes& squares);
  First first, first_from_memory;
  BlockOfDifferences (*second)(const std::byte* reference, const std::byte* actual,
                               std::int64_t steps, DifferenceSums& sums);
  BlockOfDifferences (*both)(const std::byte* reference, const std::byte* actual,
                             std::int64_t steps, StatsLanes& squares, DifferenceSums& sums,
                             BlockOfReference& block);
  void (*third)(const std::byte* reference, const std::byte* actual, std::int64_t steps,
                ApartSums& sums);
};

/// One set of loops.
///
/// Determinism   all sets give the same bits: fixed lanes, one order, nothing fused but sums of
///               exact products.
struct StatsKernels {
  const char* name;
  NarrowKernels fp32, bf16;
  void (*widen_fp32)(const std::byte* from, std::int64_t count, double* to);
  void (*widen_bf16)(const std::byte* from, std::int64_t count, double* to);
  void (*divide)(double* values, std::int64_t count, double divisor);
  bool (*all_finite)(const double* values, std::int64_t count);
  /// `count` is a multiple of kWideLanes and everything is finite.
  void (*add_wide)(WideSums& sums, const double* reference, const double* actual,
                   std::int64_t count, std::int64_t min_bits, double ulp_factor);
};

extern const StatsKernels kPlainStatsKernels;
#if defined(__x86_64__)
extern const StatsKernels kAvx2StatsKernels;
extern const StatsKernels kAvx512StatsKernels;
#endif

/// One call of accumulate() on floats.
struct FloatRun {
  const std::byte* reference;
  const std::byte* actual;
  Dtype reference_dtype, actual_dtype;
  std::int64_t index;
  double grad_scale;
  const std::uint8_t* selected;
  [[nodiscard]] bool same_dtype_unscaled() const noexcept {
    return reference_dtype == actual_dtype && grad_scale == 1.0;
  }
};

/// Requires   rounding to nearest, subnormals kept.
void accumulate_floats(const StatsKernels& kernels, Stats& stats, const FloatRun& run,
                       std::int64_t count);

/// Elements as doubles; an int64 beyond 2^53 is rounded.
void widen(const StatsKernels& kernels, const std::byte* from, Dtype dtype, std::int64_t count,
           double* to);

/// Those that this CPU can run, the fastest last.
[[nodiscard]] std::span<const StatsKernels* const> stats_kernels() noexcept;

/// accumulate() with loops of one's choice.
void accumulate_with(const StatsKernels& kernels, Stats& stats, const std::byte* reference,
                     Dtype reference_dtype, const std::byte* actual, Dtype actual_dtype,
                     std::int64_t count, std::int64_t index, double grad_scale = 1.0,
                     const std::uint8_t* selected = nullptr);

}  // namespace isoshard
