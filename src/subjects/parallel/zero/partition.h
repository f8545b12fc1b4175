// SPDX-License-Identifier: Apache-2.0
/// Which elements of a flat buffer of parameters each dp rank steps under ZeRO 1 and 2.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "subjects/parallel/range.h"

namespace isoshard {

/// All parameters one after the other in model order, padded, cut into dp equal parts; a cut may
/// lie inside a parameter.
struct ZeroPartition {
  std::int64_t part_numel = 0;        ///< elements of each dp rank, padding included
  std::vector<std::int64_t> offsets;  ///< of each parameter in the flat buffer
  /// Of flattened parameters: by parameter, then by dp rank; count 0 where a rank has none of it.
  std::vector<std::vector<Range>> runs;
  [[nodiscard]] std::int64_t padded_numel() const noexcept {
    return part_numel * static_cast<std::int64_t>(num_parts);
  }
  std::size_t num_parts = 0;
};

/// Parts start at multiples of this many elements, which are 4 bytes of bf16 for each dp rank,
/// because NCCL needs aligned buffers.
inline constexpr std::int64_t kZeroAlignmentElements = 2;

/// Errors   UsageError for no rank.
/// Source   DeepSpeed, runtime/zero/stage_1_and_2.py: flatten_dense_tensors_aligned with
///          nccl_start_alignment_factor x dp,
/// get_data_parallel_partitions.
[[nodiscard]] ZeroPartition zero_partition(std::span<const std::int64_t> numels, int dp);

/// Which parameters are reduced to their owners together: indices, from the last parameter to the
/// first, buckets in the order in which they are reduced. A bucket is closed before a parameter
/// that would make it larger than `bucket_numel`; a larger parameter is alone.
/// Errors   UsageError for a bucket of less than one element.
/// Source   DeepSpeed, runtime/zero/stage_1_and_2.py:
///          reduce_independent_p_g_buckets_and_remove_grads.
[[nodiscard]] std::vector<std::vector<std::size_t>> zero_buckets(
    std::span<const std::int64_t> numels, std::int64_t bucket_numel);

}  // namespace isoshard
