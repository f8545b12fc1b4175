// SPDX-License-Identifier: Apache-2.0
/// Comparing as kernel bodies: the blocks, lanes and roundings of the CPU's loops, so that counts,
/// maxima and positions are equal to the CPU's and only sums over blocks in fp64 differ, by their
/// order.
///
/// A *run* is one call of accumulate(). It is cut into blocks as on the CPU (stats_floats.cc says
/// what narrow, wide, close and apart are), and warp w of n takes the blocks w, w + n, w + 2 n, ...
/// A step of a narrow block is 128 bytes of each tensor: one word of a lane, which is the CPU's
/// lane of the same number. Each warp writes one Stats; merging them in a fixed tree gives the
/// run's. Nothing may be fused that the CPU does not fuse: nvcc needs --fmad=false.
#pragma once
#include <cstddef>
#include <cstdint>

#include "harness/stats/device/comparing_lanes.h"

namespace isoshard::device {

/// Adds a narrow block, or changes nothing and returns false if it has to be widened. `found` has
/// what the warp knows of maxima and positions.
ISOSHARD_WARP_BODY template <class Warp>
ISOSHARD_HOST_DEVICE bool add_narrow_block(Warp& warp, const Comparing& run, std::int64_t begin,
                                           std::int64_t end, Stats& found) {
  const bool is_bf16 = run.reference_dtype == Dtype::kBFloat16;
  const std::byte* const reference = run.reference + begin * run.reference_size;
  const std::byte* const actual = run.actual + begin * run.actual_size;
  const std::int64_t bytes = (end - begin) * run.reference_size;
  const bool is_whole =
      detail::has_whole_words(reference, bytes) && detail::has_whole_words(actual, bytes);
  warp.each([&](int lane, CompareLane& own) {
    if (is_whole) {
      own.narrow = is_bf16 ? detail::narrow_bf16<true>(reference, actual, bytes, lane)
                           : detail::narrow_fp32<true>(reference, actual, bytes, lane);
    } else {
      own.narrow = is_bf16 ? detail::narrow_bf16<false>(reference, actual, bytes, lane)
                           : detail::narrow_fp32<false>(reference, actual, bytes, lane);
    }
  });
  const bool is_equal =
      warp.largest([](int, CompareLane& own) { return own.narrow.differ == 0 ? 0 : 1; }) == 0;
  const std::int32_t max_reference =
      warp.largest([](int, CompareLane& own) { return own.narrow.max_reference; });
  if (is_equal) {
    // Squares of fp32 are summed in fp64, where no finite one is out of range.
    if (is_bf16 ? !in_range(max_reference) : max_reference >= 0x7f800000) return false;
    warp.each([](int, CompareLane& own) { own.sq_close += own.narrow.squares; });
  } else {
    const std::int32_t max_diff =
        warp.largest([](int, CompareLane& own) { return own.narrow.max_diff; });
    if (!in_range(max_reference) || !in_range(max_diff)) return false;
    const bool close = are_close(max_diff, max_reference);
    warp.each([&](int lane, CompareLane& own) {
      const NarrowLane& block = own.narrow;
      if (close) {
        own.sq_close += block.squares;
        own.reference_diff_close += static_cast<double>(block.reference_diff);
        own.sq_diff_close += static_cast<double>(block.sq_diff);
      } else {
        own.sq_diff += static_cast<double>(block.sq_diff);
        if (is_bf16) {
          detail::add_apart_bf16(own, reference, actual, bytes, lane);
        } else {
          detail::add_apart_fp32(own, reference, actual, bytes, lane);
        }
      }
      own.abs_diff += static_cast<double>(block.abs_diff);
      own.diff += static_cast<double>(block.diff);
      own.unequal_bits += block.unequal_bits;
      own.unequal_values += block.unequal_values;
    });
    locate_narrow(warp, run, begin, end, max_diff, found);
  }
  warp.each([&](int lane, CompareLane& own) { own.numel += lane == 0 ? end - begin : 0; });
  const auto largest = static_cast<double>(bits_as<float>(max_reference));
  if (largest > found.max_abs_reference) found.max_abs_reference = largest;
  return true;
}

/// Positions and steps of a narrow block, looked for only if they change what is known.
ISOSHARD_WARP_BODY template <class Warp>
ISOSHARD_HOST_DEVICE void locate_narrow(Warp& warp, const Comparing& run, std::int64_t begin,
                                        std::int64_t end, std::int32_t max_diff, Stats& found) {
  const bool is_bf16 = run.reference_dtype == Dtype::kBFloat16;
  const auto difference = [&](std::int64_t i) {
    return detail::float_at(run.actual, is_bf16, i) - detail::float_at(run.reference, is_bf16, i);
  };
  const auto first_where = [&](auto&& holds) {
    return warp.least([&](int lane, CompareLane&) {
      for (std::int64_t i = begin + lane; i < end; i += kLanes) {
        if (holds(difference(i))) return run.index + i;
      }
      return kNowhere;
    });
  };
  const bool has_unequal =
      warp.largest([](int, CompareLane& own) { return own.narrow.unequal_values; }) != 0;
  if (has_unequal && (found.first_unequal < 0 || run.index + begin < found.first_unequal)) {
    const std::int64_t first = first_where([](float d) { return d != 0; });
    if (found.first_unequal < 0 || first < found.first_unequal) found.first_unequal = first;
  }
  const float largest = bits_as<float>(max_diff);
  if (static_cast<double>(largest) > found.max_abs) {
    found.worst = first_where([&](float d) { return (d < 0 ? -d : d) == largest; });
    found.max_abs = static_cast<double>(largest);
  }
  if (max_diff == 0) return;
  const std::int32_t max_key =
      warp.largest([](int, CompareLane& own) { return own.narrow.max_key; });
  if (steps_of_key(max_key, run.steps.fraction_bits) <= found.max_ulp) return;
  const double steps = warp.largest_number([&](int lane, CompareLane&) {
    double result = 0;
    for (std::int64_t i = begin + lane; i < end; i += kLanes) {
      const double of_element =
          steps_between(detail::float_at(run.reference, is_bf16, i), difference(i), run.steps);
      result = of_element > result ? of_element : result;
    }
    return result;
  });
  if (steps > found.max_ulp) found.max_ulp = steps;
}

/// Compares the blocks first, first + stride, ... of a run. All lanes get the result.
ISOSHARD_WARP_BODY template <class Warp>
ISOSHARD_HOST_DEVICE Stats compare_blocks(Warp& warp, const Comparing& run, std::int64_t first,
                                          std::int64_t stride) {
  Stats found;
  for (std::int64_t begin = first * run.block; begin < run.count; begin += stride * run.block) {
    const std::int64_t end = begin + run.block < run.count ? begin + run.block : run.count;
    if (run.is_narrow && add_narrow_block(warp, run, begin, end, found)) continue;
    warp.each([&](int lane, CompareLane& own) {
      for (std::int64_t i = begin + lane; i < end; i += kLanes) {
        if (run.is_integers) {
          detail::add_integers(own, run, i);
        } else {
          detail::add_wide(own, run, i);
        }
      }
    });
  }
  return total_of(warp, found);
}

/// What all lanes know, with `found`.
ISOSHARD_WARP_BODY template <class Warp>
ISOSHARD_HOST_DEVICE Stats total_of(Warp& warp, Stats found) {
  const auto sum = [&](std::int64_t CompareLane::*member) {
    return warp.sum([&](int, CompareLane& own) { return own.*member; });
  };
  const auto total = [&](double CompareLane::*member) {
    return warp.total([&](int, CompareLane& own) { return own.*member; });
  };
  const auto largest = [&](double CompareLane::*member) {
    return warp.largest_number([&](int, CompareLane& own) { return own.*member; });
  };
  Stats wide;
  wide.numel = sum(&CompareLane::numel);
  wide.unequal_bits = sum(&CompareLane::unequal_bits);
  wide.unequal_values = sum(&CompareLane::unequal_values);
  wide.nan_reference = sum(&CompareLane::nan_reference);
  wide.nan_actual = sum(&CompareLane::nan_actual);
  wide.inf_reference = sum(&CompareLane::inf_reference);
  wide.inf_actual = sum(&CompareLane::inf_actual);
  wide.nonfinite_mismatch = sum(&CompareLane::nonfinite_mismatch);
  const double close = total(&CompareLane::sq_close);
  const double reference_diff = total(&CompareLane::reference_diff_close);
  const double close_diff = total(&CompareLane::sq_diff_close);
  wide.sum_sq_reference = close + total(&CompareLane::sq_reference);
  wide.sum_sq_actual = close + 2 * reference_diff + close_diff + total(&CompareLane::sq_actual);
  wide.sum_sq_diff = close_diff + total(&CompareLane::sq_diff);
  wide.dot = close + reference_diff + total(&CompareLane::dot);
  wide.sum_abs_diff = total(&CompareLane::abs_diff);
  wide.sum_diff = total(&CompareLane::diff);
  wide.max_abs = largest(&CompareLane::max_abs);
  wide.max_ulp = largest(&CompareLane::max_ulp);
  wide.max_abs_reference = largest(&CompareLane::max_reference);
  const auto least = [](std::int64_t position) { return position == kNowhere ? -1 : position; };
  wide.first_unequal = least(warp.least(
      [](int, CompareLane& own) { return own.first_unequal < 0 ? kNowhere : own.first_unequal; }));
  wide.worst = least(warp.least([&](int, CompareLane& own) {
    return own.worst >= 0 && own.max_abs == wide.max_abs ? own.worst : kNowhere;
  }));
  merge_into(found, wide);
  return found;
}

/// How many partial results one thread merges, in order.
inline constexpr std::int64_t kMergedByThread = 16;

/// What thread `thread` of a merging kernel says of `count` partial results.
ISOSHARD_HOST_DEVICE inline Stats merged_by(std::int64_t thread, const Stats* partials,
                                            std::int64_t count) {
  Stats result;
  const std::int64_t begin = thread * kMergedByThread;
  for (std::int64_t i = begin; i < begin + kMergedByThread && i < count; ++i)
    merge_into(result, partials[i]);
  return result;
}

}  // namespace isoshard::device
