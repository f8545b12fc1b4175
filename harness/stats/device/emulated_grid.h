// SPDX-License-Identifier: Apache-2.0
/// The grids of device_stats.cu on a CPU, block by block and thread by thread, for tests of the
/// kernels' bodies.
#pragma once
#include <cstddef>
#include <cstdint>

#include "harness/stats/stats.h"

namespace isoshard::device {

/// As DeviceStats::accumulate, with a grid of `warps` warps.
void emulate_accumulate(Stats& stats, const std::byte* reference, Dtype reference_dtype,
                        const std::byte* actual, Dtype actual_dtype, std::int64_t count,
                        std::int64_t index, double grad_scale = 1.0,
                        const std::uint8_t* selected = nullptr, std::int64_t warps = 2048);
/// As DeviceStats::digest_of.
[[nodiscard]] std::uint64_t emulate_digest(const std::byte* data, std::size_t bytes,
                                           std::uint64_t seed = 0);

}  // namespace isoshard::device
