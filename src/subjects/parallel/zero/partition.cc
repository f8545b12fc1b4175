// SPDX-License-Identifier: Apache-2.0
// Equal parts of a padded flat buffer.
#include "subjects/parallel/zero/partition.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/base/error.h"

namespace isoshard {

ZeroPartition zero_partition(std::span<const std::int64_t> numels, int dp) {
  if (dp < 1)
    throw UsageError(
        fmt::format("the number of ranks to partition over must be at least 1, got {}", dp));
  ZeroPartition partition;
  partition.num_parts = static_cast<std::size_t>(dp);
  std::int64_t total = 0;
  for (const std::int64_t numel : numels) {
    partition.offsets.push_back(total);
    total += numel;
  }
  const std::int64_t unit = kZeroAlignmentElements * dp;
  partition.part_numel = (total + unit - 1) / unit * kZeroAlignmentElements;
  for (std::size_t i = 0; i < numels.size(); ++i) {
    std::vector<Range>& runs = partition.runs.emplace_back();
    for (std::int64_t rank = 0; rank < dp; ++rank) {
      const std::int64_t first = std::max(rank * partition.part_numel, partition.offsets[i]);
      const std::int64_t last =
          std::min((rank + 1) * partition.part_numel, partition.offsets[i] + numels[i]);
      runs.push_back(first < last ? Range{first - partition.offsets[i], last - first} : Range{});
    }
  }
  return partition;
}

std::vector<std::vector<std::size_t>> zero_buckets(std::span<const std::int64_t> numels,
                                                   std::int64_t bucket_numel) {
  if (bucket_numel < 1)
    throw UsageError(fmt::format("a bucket must hold at least 1 element, got {}", bucket_numel));
  std::vector<std::vector<std::size_t>> buckets;
  std::int64_t open = 0;
  for (std::size_t i = numels.size(); i-- > 0;) {
    if (buckets.empty() || open + numels[i] > bucket_numel) {
      buckets.emplace_back();
      open = 0;
    }
    buckets.back().push_back(i);
    open += numels[i];
  }
  return buckets;
}

}  // namespace isoshard
