// SPDX-License-Identifier: Apache-2.0
/// What one lane of a comparing warp does: how it reads elements, and what it adds up. comparing.h
/// says what lanes, blocks and runs are.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/base/float_bits.h"
#include "harness/stats/device/execution.h"
#include "harness/stats/stats_formulas.h"
#include "harness/stats/stats_kernels.h"

namespace isoshard::device {

/// One run, as a kernel takes it.
struct Comparing {
  const std::byte* reference = nullptr;
  const std::byte* actual = nullptr;
  const std::uint8_t* selected = nullptr;
  Dtype reference_dtype = Dtype::kFloat32, actual_dtype = Dtype::kFloat32;
  int reference_size = 4, actual_size = 4;  ///< bytes of an element
  std::int64_t count = 0, index = 0;
  double grad_scale = 1;
  Steps steps;
  bool is_narrow = false;    ///< blocks may be compared in their own dtype
  bool is_integers = false;  ///< both are, and nothing is scaled
  std::int64_t block = 0;    ///< elements of one
};

/// Units   `count` elements; pointers are of the memory that the bodies run on.
[[nodiscard]] Comparing comparing(const std::byte* reference, Dtype reference_dtype,
                                  const std::byte* actual, Dtype actual_dtype, std::int64_t count,
                                  std::int64_t index, double grad_scale,
                                  const std::uint8_t* selected) noexcept;

[[nodiscard]] inline std::int64_t num_blocks(const Comparing& run) noexcept {
  return run.count == 0 ? 0 : (run.count + run.block - 1) / run.block;
}

/// What a lane knows of the narrow block that its warp is at.
struct NarrowLane {
  std::int32_t differ = 0, max_reference = 0, max_diff = 0, max_key = -0x7f800000;
  std::int32_t unequal_bits = 0, unequal_values = 0;
  double squares = 0;
  float sq_diff = 0, reference_diff = 0, abs_diff = 0, diff = 0;
};

/// What a lane knows of all its warp's blocks.
struct CompareLane {
  std::int64_t numel = 0, unequal_bits = 0, unequal_values = 0;
  std::int64_t nan_reference = 0, nan_actual = 0, inf_reference = 0, inf_actual = 0;
  std::int64_t nonfinite_mismatch = 0;
  double sq_close = 0, reference_diff_close = 0, sq_diff_close = 0;
  double sq_reference = 0, sq_actual = 0, sq_diff = 0, dot = 0;  ///< of all but close blocks
  double abs_diff = 0, diff = 0;
  // of wide elements
  double max_abs = 0, max_ulp = 0, max_reference = 0;
  std::int64_t first_unequal = -1, worst = -1;
  NarrowLane narrow;
};

inline constexpr std::int64_t kNowhere = INT64_MAX;

namespace detail {

ISOSHARD_HOST_DEVICE inline bool is_nan_bits(std::uint64_t bits) {
  return (bits & 0x7fffffffffffffffULL) > 0x7ff0000000000000ULL;
}
ISOSHARD_HOST_DEVICE inline bool is_finite_number(double x) {
  return (bits_as<std::uint64_t>(x) & 0x7ff0000000000000ULL) != 0x7ff0000000000000ULL;
}
ISOSHARD_HOST_DEVICE inline bool is_nan_number(double x) {
  return is_nan_bits(bits_as<std::uint64_t>(x));
}
ISOSHARD_HOST_DEVICE inline double magnitude_of(double x) {
  return bits_as<double>(bits_as<std::uint64_t>(x) & 0x7fffffffffffffffULL);
}

constexpr std::uint64_t kQuietBit = 0x0008000000000000ULL;

/// As x86 widens: a NaN keeps sign and payload and becomes quiet. A GPU's conversion keeps neither.
ISOSHARD_HOST_DEVICE inline double widened(float x) {
  const auto bits = bits_as<std::uint32_t>(x);
  if ((bits & 0x7fffffffU) <= 0x7f800000U) return static_cast<double>(x);
  return bits_as<double>(static_cast<std::uint64_t>(bits & 0x80000000U) << 32 |
                         0x7ff0000000000000ULL | kQuietBit |
                         static_cast<std::uint64_t>(bits & 0x7fffffU) << 29);
}

/// As x86 divides: a NaN keeps its payload and becomes quiet.
ISOSHARD_HOST_DEVICE inline double divided(double x, double divisor) {
  const auto bits = bits_as<std::uint64_t>(x);
  return is_nan_bits(bits) ? bits_as<double>(bits | kQuietBit) : x / divisor;
}

ISOSHARD_HOST_DEVICE inline std::int64_t integer_at(const std::byte* data, Dtype dtype,
                                                    std::int64_t i) {
  switch (dtype) {
    case Dtype::kInt64:
      return load<std::int64_t>(data + i * 8);
    case Dtype::kInt32:
      return load<std::int32_t>(data + i * 4);
    case Dtype::kInt16:
      return load<std::int16_t>(data + i * 2);
    case Dtype::kInt8:
      return load<std::int8_t>(data + i);
    case Dtype::kUint8:
      return load<std::uint8_t>(data + i);
    default:
      return data[i] == std::byte{0} ? 0 : 1;
  }
}

/// An element in fp64 (an int64 beyond 2^53 is rounded).
ISOSHARD_HOST_DEVICE inline double number_at(const std::byte* data, Dtype dtype, std::int64_t i) {
  switch (dtype) {
    case Dtype::kFloat64:
      return load<double>(data + i * 8);
    case Dtype::kFloat32:
      return widened(load<float>(data + i * 4));
    case Dtype::kBFloat16:
      return widened(bf16_to_float(load<std::uint16_t>(data + i * 2)));
    case Dtype::kFloat16:
      return widened(fp16_to_float(load<std::uint16_t>(data + i * 2)));
    default:
      return static_cast<double>(integer_at(data, dtype, i));
  }
}

/// Whether every word of a block of `bytes` bytes can be read as one.
ISOSHARD_HOST_DEVICE inline bool has_whole_words(const std::byte* block, std::int64_t bytes) {
  return bytes == kStatsBlockBytes && reinterpret_cast<std::uintptr_t>(block) % 4 == 0;
}

/// The word at `offset` of a block; zeros behind its end.
template <bool kWhole>
ISOSHARD_HOST_DEVICE inline std::int32_t word_at(const std::byte* block, std::int64_t offset,
                                                 std::int64_t bytes) {
#if defined(__CUDA_ARCH__)
  if constexpr (kWhole) return *reinterpret_cast<const std::int32_t*>(block + offset);
#endif
  if (kWhole || offset + 4 <= bytes) return load<std::int32_t>(block + offset);
  if (offset + 2 <= bytes) return load<std::uint16_t>(block + offset);  // the last of odd bf16
  return 0;
}

/// fp32 of which the bits are `word`.
ISOSHARD_HOST_DEVICE inline float as_float(std::int32_t word) {
  return bits_as<float>(word);
}
ISOSHARD_HOST_DEVICE inline std::int32_t larger(std::int32_t a, std::int32_t b) {
  return a > b ? a : b;
}
constexpr auto kHighHalf = static_cast<std::int32_t>(0xffff0000);

/// Sums of differences in fp32 over the steps of a block, and what knows no order.
struct DifferenceLane {
  float squares = 0, products = 0, magnitudes = 0, differences = 0;

  ISOSHARD_HOST_DEVICE void add(NarrowLane& lane, std::int32_t r_word, std::int32_t a_word) {
    const float r = as_float(r_word);
    const float d = as_float(a_word) - r;
    const std::int32_t magnitude = bits_as<std::int32_t>(d) & 0x7fffffff;
    magnitudes += as_float(magnitude);
    differences += d;
    squares += d * d;
    products += r * d;
    lane.max_diff = larger(lane.max_diff, magnitude);
    lane.max_key =
        larger(lane.max_key, magnitude - larger(r_word & 0x7f800000, std::int32_t{0x00800000}));
  }
};

/// One lane's pass over a narrow block of fp32.
template <bool kWhole>
ISOSHARD_HOST_DEVICE inline NarrowLane narrow_fp32(const std::byte* reference,
                                                   const std::byte* actual, std::int64_t bytes,
                                                   int lane) {
  NarrowLane result;
  DifferenceLane sums;
  ISOSHARD_UNROLL
  for (std::int64_t offset = lane * 4; offset < (kWhole ? kStatsBlockBytes : bytes);
       offset += kStatsStepBytes) {
    const std::int32_t r = word_at<kWhole>(reference, offset, bytes);
    const std::int32_t a = word_at<kWhole>(actual, offset, bytes);
    result.differ |= r ^ a;
    result.max_reference = larger(result.max_reference, r & 0x7fffffff);
    const double wide = static_cast<double>(as_float(r));
    result.squares = add_exact_product(result.squares, wide, wide);
    result.unequal_bits += r != a ? 1 : 0;
    result.unequal_values += r != a && ((r | a) & 0x7fffffff) != 0 ? 1 : 0;
    sums.add(result, r, a);
  }
  result.sq_diff = sums.squares;
  result.reference_diff = sums.products;
  result.abs_diff = sums.magnitudes;
  result.diff = sums.differences;
  return result;
}

/// The same of bf16, of which a word holds two.
template <bool kWhole>
ISOSHARD_HOST_DEVICE inline NarrowLane narrow_bf16(const std::byte* reference,
                                                   const std::byte* actual, std::int64_t bytes,
                                                   int lane) {
  NarrowLane result;
  DifferenceLane even;
  DifferenceLane odd;
  float even_squares = 0;
  float odd_squares = 0;
  const auto count = [&](std::int32_t r, std::int32_t a) {
    result.unequal_bits += r != a ? 1 : 0;
    result.unequal_values += r != a && ((r | a) & 0x7fff) != 0 ? 1 : 0;
  };
  ISOSHARD_UNROLL
  for (std::int64_t offset = lane * 4; offset < (kWhole ? kStatsBlockBytes : bytes);
       offset += kStatsStepBytes) {
    const std::int32_t r = word_at<kWhole>(reference, offset, bytes);
    const std::int32_t a = word_at<kWhole>(actual, offset, bytes);
    const auto r_even = static_cast<std::int32_t>(static_cast<std::uint32_t>(r) << 16);
    const auto a_even = static_cast<std::int32_t>(static_cast<std::uint32_t>(a) << 16);
    result.differ |= r ^ a;
    result.max_reference =
        larger(result.max_reference, larger(r_even & 0x7fff0000, r & 0x7fff0000));
    even_squares = add_exact_product(even_squares, as_float(r_even), as_float(r_even));
    odd_squares = add_exact_product(odd_squares, as_float(r & kHighHalf), as_float(r & kHighHalf));
    count(r & 0xffff, a & 0xffff);
    count((r >> 16) & 0xffff, (a >> 16) & 0xffff);
    even.add(result, r_even, a_even);
    odd.add(result, r & kHighHalf, a & kHighHalf);
  }
  result.squares = static_cast<double>(even_squares + odd_squares);
  result.sq_diff = even.squares + odd.squares;
  result.reference_diff = even.products + odd.products;
  result.abs_diff = even.magnitudes + odd.magnitudes;
  result.diff = even.differences + odd.differences;
  return result;
}

/// Adds a lane's squares and products of an apart block.
ISOSHARD_HOST_DEVICE inline void add_apart_fp32(CompareLane& own, const std::byte* reference,
                                                const std::byte* actual, std::int64_t bytes,
                                                int lane) {
  for (std::int64_t offset = lane * 4; offset < bytes; offset += kStatsStepBytes) {
    const double r = static_cast<double>(as_float(word_at<false>(reference, offset, bytes)));
    const double a = static_cast<double>(as_float(word_at<false>(actual, offset, bytes)));
    own.sq_reference = add_exact_product(own.sq_reference, r, r);
    own.sq_actual = add_exact_product(own.sq_actual, a, a);
    own.dot = add_exact_product(own.dot, r, a);
  }
}
ISOSHARD_HOST_DEVICE inline void add_apart_bf16(CompareLane& own, const std::byte* reference,
                                                const std::byte* actual, std::int64_t bytes,
                                                int lane) {
  float rr[2] = {};
  float aa[2] = {};
  float ra[2] = {};
  for (std::int64_t offset = lane * 4; offset < bytes; offset += kStatsStepBytes) {
    const std::int32_t r_word = word_at<false>(reference, offset, bytes);
    const std::int32_t a_word = word_at<false>(actual, offset, bytes);
    for (int odd = 0; odd < 2; ++odd) {
      const float r = bits_as<float>(odd == 0 ? static_cast<std::uint32_t>(r_word) << 16
                                              : static_cast<std::uint32_t>(r_word) & 0xffff0000U);
      const float a = bits_as<float>(odd == 0 ? static_cast<std::uint32_t>(a_word) << 16
                                              : static_cast<std::uint32_t>(a_word) & 0xffff0000U);
      rr[odd] = add_exact_product(rr[odd], r, r);
      aa[odd] = add_exact_product(aa[odd], a, a);
      ra[odd] = add_exact_product(ra[odd], r, a);
    }
  }
  own.sq_reference += static_cast<double>(rr[0] + rr[1]);
  own.sq_actual += static_cast<double>(aa[0] + aa[1]);
  own.dot += static_cast<double>(ra[0] + ra[1]);
}

/// An element of a narrow block as fp32.
ISOSHARD_HOST_DEVICE inline float float_at(const std::byte* data, bool is_bf16, std::int64_t i) {
  return is_bf16 ? bf16_to_float(load<std::uint16_t>(data + i * 2)) : load<float>(data + i * 4);
}

/// Adds one pair of elements in fp64.
ISOSHARD_HOST_DEVICE inline void add_wide(CompareLane& own, const Comparing& run, std::int64_t i) {
  if (run.selected != nullptr && run.selected[i] == 0) return;
  ++own.numel;
  const double r = number_at(run.reference, run.reference_dtype, i);
  const double unscaled = number_at(run.actual, run.actual_dtype, i);
  const double a = run.grad_scale == 1.0 ? unscaled : divided(unscaled, run.grad_scale);
  const std::int64_t position = run.index + i;
  const auto is_first = [&] {
    if (own.first_unequal < 0 || position < own.first_unequal) own.first_unequal = position;
  };
  const bool same_bits = bits_as<std::uint64_t>(r) == bits_as<std::uint64_t>(a);
  if (!is_finite_number(r) || !is_finite_number(a)) {
    const bool r_nan = is_nan_number(r);
    const bool a_nan = is_nan_number(a);
    own.nan_reference += r_nan ? 1 : 0;
    own.nan_actual += a_nan ? 1 : 0;
    own.inf_reference += !r_nan && !is_finite_number(r) ? 1 : 0;
    own.inf_actual += !a_nan && !is_finite_number(a) ? 1 : 0;
    if (!((r_nan && a_nan) || r == a)) {
      ++own.nonfinite_mismatch;
      ++own.unequal_values;
      is_first();
    }
    bool same_bytes = same_bits;
    if (run.reference_dtype == run.actual_dtype && run.grad_scale == 1.0) {
      same_bytes = true;
      for (std::int64_t byte = i * run.reference_size; byte < (i + 1) * run.reference_size; ++byte)
        same_bytes = same_bytes && run.reference[byte] == run.actual[byte];
    }
    own.unequal_bits += same_bytes ? 0 : 1;
    return;
  }
  const double d = a - r;
  const double abs_d = magnitude_of(d);
  const double abs_r = magnitude_of(r);
  own.sq_reference += r * r;
  own.sq_actual += a * a;
  own.sq_diff += d * d;
  own.dot += r * a;
  own.abs_diff += abs_d;
  own.diff += d;
  own.unequal_bits += same_bits ? 0 : 1;
  if (r != a) {
    ++own.unequal_values;
    is_first();
  }
  if (abs_d > own.max_abs) {
    own.max_abs = abs_d;
    own.worst = position;
  }
  own.max_reference = abs_r > own.max_reference ? abs_r : own.max_reference;
  // 2^-e of the reference: the exponent field mirrored at the bias. Both factors are representable.
  const std::int64_t min_bits = static_cast<std::int64_t>(run.steps.min_exponent + 1023) << 52;
  std::int64_t exponent = bits_as<std::int64_t>(r) & 0x7ff0000000000000LL;
  exponent = exponent > min_bits ? exponent : min_bits;
  const auto inverse = bits_as<double>(0x7fe0000000000000LL - exponent);
  const double ulps = abs_d * inverse * power_of_two(run.steps.fraction_bits);
  own.max_ulp = ulps > own.max_ulp ? ulps : own.max_ulp;
}

/// Adds one pair of integers, whose difference is taken before anything is rounded to fp64.
ISOSHARD_HOST_DEVICE inline void add_integers(CompareLane& own, const Comparing& run,
                                              std::int64_t i) {
  if (run.selected != nullptr && run.selected[i] == 0) return;
  const std::int64_t r = integer_at(run.reference, run.reference_dtype, i);
  const std::int64_t a = integer_at(run.actual, run.actual_dtype, i);
  const auto ru = static_cast<std::uint64_t>(r);
  const auto au = static_cast<std::uint64_t>(a);
  const auto magnitude = static_cast<double>(r > a ? ru - au : au - ru);
  const auto rd = static_cast<double>(r);
  const auto ad = static_cast<double>(a);
  ++own.numel;
  if (r != a) {
    ++own.unequal_bits;
    ++own.unequal_values;
    if (own.first_unequal < 0) own.first_unequal = run.index + i;
  }
  if (magnitude > own.max_abs) {
    own.max_abs = magnitude;
    own.worst = run.index + i;
  }
  own.max_ulp = magnitude > own.max_ulp ? magnitude : own.max_ulp;
  const double abs_r = magnitude_of(rd);
  own.max_reference = abs_r > own.max_reference ? abs_r : own.max_reference;
  own.sq_reference += rd * rd;
  own.sq_actual += ad * ad;
  own.sq_diff += magnitude * magnitude;
  own.dot += rd * ad;
  own.abs_diff += magnitude;
  own.diff += r > a ? -magnitude : magnitude;
}

}  // namespace detail

}  // namespace isoshard::device
