// SPDX-License-Identifier: Apache-2.0
/// Launches of device_stats.cu as loops.
#include "harness/stats/device/emulated_grid.h"

#include <algorithm>
#include <vector>

#include "harness/stats/device/comparing.h"
#include "harness/stats/device/digesting.h"

namespace isoshard::device {

void emulate_accumulate(Stats& stats, const std::byte* reference, Dtype reference_dtype,
                        const std::byte* actual, Dtype actual_dtype, std::int64_t count,
                        std::int64_t index, double grad_scale, const std::uint8_t* selected,
                        std::int64_t warps) {
  const Comparing run = comparing(reference, reference_dtype, actual, actual_dtype, count, index,
                                  grad_scale, selected);
  warps = std::min(warps, num_blocks(run));
  std::vector<Stats> partials;
  for (std::int64_t w = 0; w < warps; ++w) {
    EmulatedWarp<CompareLane> warp;
    partials.push_back(compare_blocks(warp, run, w, warps));
  }
  while (partials.size() > 1) {
    const auto size = static_cast<std::int64_t>(partials.size());
    std::vector<Stats> merged;
    for (std::int64_t thread = 0; thread * kMergedByThread < size; ++thread)
      merged.push_back(merged_by(thread, partials.data(), size));
    partials = std::move(merged);
  }
  if (!partials.empty()) merge(stats, partials.front());
}

std::uint64_t emulate_digest(const std::byte* data, std::size_t bytes, std::uint64_t seed) {
  const auto size = static_cast<std::int64_t>(bytes);
  if (size <= kShortDigestBytes) return digest_of(data, bytes, seed);
  const DigestSecret secret = digest_secret(seed);
  const std::int64_t threads = num_digest_blocks(size) * kAccumulators;
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(threads));
  for (std::int64_t thread = 0; thread < threads; ++thread)
    sum_block(thread, data, secret, sums.data());
  std::uint64_t accumulators[kAccumulators];
  for (std::int64_t lane = 0; lane < kAccumulators; ++lane)
    accumulators[lane] = chained(lane, data, size, secret, sums.data());
  return digest_of_accumulators(accumulators, size, secret);
}

}  // namespace isoshard::device
