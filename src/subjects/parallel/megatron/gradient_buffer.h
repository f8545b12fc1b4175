// SPDX-License-Identifier: Apache-2.0
/// Where Megatron-Core's parameters lie in the buckets of its gradient buffer, and which run of
/// each a dp rank steps.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/base/dtype.h"
#include "subjects/parallel/megatron/fused_layers.h"
#include "subjects/parallel/range.h"

namespace isoshard {

/// One bucket: a contiguous buffer. What no parameter covers is padding.
struct BufferBucket {
  /// Indices into the list of parameters, in the order of the buffer.
  std::vector<std::size_t> parameters;
  std::vector<std::int64_t> begins;  ///< of each in the bucket, in elements
  std::int64_t numel = 0;            ///< padding included
};

/// With the distributed optimizer parameters start at multiples of 64 elements, and a bucket has a
/// multiple of lcm(dp, 128).
inline constexpr std::int64_t kParameterAlignment = 64, kBucketAlignment = 128;

/// Parameters from the last to the first; a bucket that has reached `bucket_numel` is closed.
///
/// Errors   UsageError for a dp degree or a bucket size below 1.
/// Source   Megatron-Core 0.19, distributed/param_and_grad_buffer.py: _ParamAndGradBuffer.
[[nodiscard]] std::vector<BufferBucket> buffer_buckets(std::span<const std::int64_t> numels,
                                                       std::int64_t bucket_numel, int dp,
                                                       bool distributed_optimizer);

/// What dp rank `dp_rank` steps of the parameter that covers [begin, begin + numel) of a bucket:
/// its part of the dp equal parts of the bucket. Count 0 where it has none.
[[nodiscard]] Range owned_run(const BufferBucket& bucket, std::int64_t begin, std::int64_t numel,
                              int dp, int dp_rank);

/// The same for a parameter that lies in several runs after `begin`, as elements of the parameter:
/// rising, neighbors joined.
[[nodiscard]] std::vector<Range> owned_runs(const BufferBucket& bucket, std::int64_t begin,
                                            std::span<const StoredRun> runs, int dp, int dp_rank);

/// The dtype of main gradients: fp32, or fp64 for fp64 parameters.
[[nodiscard]] Dtype main_gradient_dtype(Dtype parameters) noexcept;

}  // namespace isoshard
