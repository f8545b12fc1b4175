// SPDX-License-Identifier: Apache-2.0
// Buckets from the last parameter to the first.
#include "subjects/parallel/megatron/gradient_buffer.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/base/error.h"

namespace isoshard {
namespace {

std::int64_t padded(std::int64_t size, std::int64_t unit) {
  return (size + unit - 1) / unit * unit;
}

}  // namespace

std::vector<BufferBucket> buffer_buckets(std::span<const std::int64_t> numels,
                                         std::int64_t bucket_numel, int dp,
                                         bool distributed_optimizer) {
  if (dp < 1 || bucket_numel < 1) {
    throw UsageError(fmt::format(
        "the bucket size and the dp degree must be at least 1, got {} elements and {} ranks",
        bucket_numel, dp));
  }
  const std::int64_t unit = distributed_optimizer ? kParameterAlignment : 1;
  const std::int64_t bucket_unit =
      distributed_optimizer ? std::lcm(kBucketAlignment, static_cast<std::int64_t>(dp)) : 1;
  std::vector<BufferBucket> buckets;
  BufferBucket open;
  const auto close = [&] {
    if (open.parameters.empty()) return;
    open.numel = padded(open.numel, bucket_unit);
    buckets.push_back(std::move(open));
    open = {};
  };
  for (std::size_t i = numels.size(); i-- > 0;) {
    const std::int64_t begin = padded(open.numel, unit);
    open.parameters.push_back(i);
    open.begins.push_back(begin);
    open.numel = begin + numels[i];
    if (open.numel >= bucket_numel) close();
  }
  close();
  return buckets;
}

Range owned_run(const BufferBucket& bucket, std::int64_t begin, std::int64_t numel, int dp,
                int dp_rank) {
  const std::int64_t part = bucket.numel / dp;
  const std::int64_t first = std::max(begin, dp_rank * part),
                     last = std::min(begin + numel, (dp_rank + 1) * part);
  return first < last ? Range{first - begin, last - first} : Range{};
}

std::vector<Range> owned_runs(const BufferBucket& bucket, std::int64_t begin,
                              std::span<const StoredRun> runs, int dp, int dp_rank) {
  std::vector<Range> owned;
  for (const StoredRun& run : runs) {
    Range own = owned_run(bucket, begin + run.stored, run.count, dp, dp_rank);
    if (own.count == 0) continue;
    own.begin += run.begin;
    if (!owned.empty() && owned.back().begin + owned.back().count == own.begin) {
      owned.back().count += own.count;
    } else {
      owned.push_back(own);
    }
  }
  return owned;
}

Dtype main_gradient_dtype(Dtype parameters) noexcept {
  return parameters == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
}

}  // namespace isoshard
