// SPDX-License-Identifier: Apache-2.0
/// The reductions on raw memory: what every backend that promises ReductionOrder kOrdered, kRing or
/// kTree computes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/dtype.h"
#include "core/comm/communicator.h"

namespace isoshard {

/// output[i] = round(reduce over s, in the order of `sources`, of sources[s][i]), each in the
/// accumulator of the dtype.
///
/// Floats   sum adds in the accumulator (fp64 for fp64, fp32 otherwise), avg then divides there by
/// the number of sources;
///           one rounding to the dtype. min and max propagate NaN and keep the first of equal
///             values (so of -0 and +0).
/// Integers  sum wraps around modulo 2^bits; avg divides the wrapped sum, towards zero.
/// Bool      sum and max: any; min: all. Any non-zero byte counts as true; the result is 0 or 1.
/// Errors    ShapeError for avg of bool, and for no source.
/// Ranks     local. `output` may be one of the sources.
/// Determinism  element by element: neither the count nor the alignment changes a bit (NaN payloads
///              are not promised).
/// Source    docs/internals/reduction.md, "ordered".
void reduce_ordered(Reduction reduction, Dtype dtype, std::span<const std::byte* const> sources,
                    std::byte* output, std::int64_t count);

/// As reduce_ordered, but with a rounding to the dtype after each addition: output[i] = y_{n-1}
/// with y_0 = sources[0][i], y_s = round(y_{s-1} + sources[s][i]); avg = round(y_{n-1} / n).
/// Source    docs/internals/reduction.md, "ring": the sources in the order of the hops.
void reduce_in_hops(Reduction reduction, Dtype dtype, std::span<const std::byte* const> sources,
                    std::byte* output, std::int64_t count);

/// As reduce_in_hops, but neighbors are added in pairs, then pairs of pairs. A source without a
/// partner waits for the next level.
/// Source    docs/internals/reduction.md, "tree".
void reduce_in_pairs(Reduction reduction, Dtype dtype, std::span<const std::byte* const> sources,
                     std::byte* output, std::int64_t count);

/// The elements of each of the ring's chunks but the last ones, which may be shorter or empty:
/// ceil(count / num_ranks).
[[nodiscard]] std::int64_t ring_chunk_size(std::int64_t count, int num_ranks) noexcept;

/// Where the elements at hand lie in the tensor that is all-reduced: only `ring` adds them in an
/// order that depends on it.
struct PartOfTensor {
  std::int64_t begin = 0;
  std::int64_t count_of_tensor = 0;
};

/// Reduces `count` elements of an all-reduce; sources by group rank.
/// Errors    as reduce_ordered; UsageError for kNative.
void reduce_part(ReductionOrder order, Reduction reduction, Dtype dtype,
                 std::span<const std::byte* const> sources, PartOfTensor part, std::byte* output,
                 std::int64_t count);

/// Reduces `count` elements of a reduce-scatter, whose result goes to `last_rank`, where a ring
/// ends; sources by group rank.
/// Errors    as reduce_part.
void reduce_block_of_rank(ReductionOrder order, Reduction reduction, Dtype dtype,
                          std::span<const std::byte* const> sources, int last_rank,
                          std::byte* output, std::int64_t count);

/// Throws what reduce_ordered would throw for this pair, before any data moves.
void check_reducible(Reduction reduction, Dtype dtype);

}  // namespace isoshard
