// SPDX-License-Identifier: Apache-2.0
/// The ordered reduction on raw memory: what every backend that promises ReductionOrder::kOrdered computes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "comm/communicator.h"

namespace isoshard {

/// output[i] = round(reduce over s, in the order of `sources`, of sources[s][i]), each in the accumulator of the dtype.
///
/// Floats    sum adds in the accumulator (fp64 for fp64, fp32 otherwise), avg then divides there by the number of sources;
///           one rounding to the dtype. min and max propagate NaN and keep the first of equal values (so of -0 and +0).
/// Integers  sum wraps around modulo 2^bits; avg divides the wrapped sum, towards zero.
/// Bool      sum and max: any; min: all. Any non-zero byte counts as true; the result is 0 or 1.
/// Errors    ShapeError for avg of bool, and for no source.
/// Ranks     local. `output` may be one of the sources.
/// Determinism  element by element: neither the count nor the alignment changes a bit (NaN payloads are not promised).
/// Source    docs/reduction.md, "ordered".
void reduce_ordered(Reduction reduction, Dtype dtype, std::span<const std::byte* const> sources, std::byte* output, std::int64_t count);

/// Throws what reduce_ordered would throw for this pair, before any data moves.
void check_reducible(Reduction reduction, Dtype dtype);

}  // namespace isoshard
