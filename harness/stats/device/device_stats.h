// SPDX-License-Identifier: Apache-2.0
/// Statistics and digests of tensors in a GPU's memory, made there.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "harness/stats/stats.h"

namespace isoshard {

/// accumulate() and digest_of() on one stream of the current CUDA device.
///
/// Requires     pointers of that device's memory, readable on the stream.
/// Guarantees   counts, maxima, positions and digests are equal to the CPU's; sums are within 1e-12
///              of its (of the sum of magnitudes, where signs differ).
/// Determinism  results depend on the values alone: neither on the number of multiprocessors nor on
///              what else runs.
///
///     DeviceStats device(stream);
///     device.accumulate(stats, reference, Dtype::kBFloat16, actual, Dtype::kBFloat16, n, 0);
///     const std::uint64_t digest = device.digest_of(actual, 2 * n);
class DeviceStats {
 public:
  /// `stream` is a cudaStream_t.
  /// Errors   NotBuiltError in a build without CUDA; InfrastructureError that carries CUDA's words.
  explicit DeviceStats(void* stream);
  ~DeviceStats();
  DeviceStats(const DeviceStats&) = delete;
  DeviceStats& operator=(const DeviceStats&) = delete;

  /// As the function of the same name; returns when the result is there.
  /// Errors   InfrastructureError that carries CUDA's words.
  void accumulate(Stats& stats, const std::byte* reference, Dtype reference_dtype,
                  const std::byte* actual, Dtype actual_dtype, std::int64_t count,
                  std::int64_t index, double grad_scale = 1.0,
                  const std::uint8_t* selected = nullptr);
  [[nodiscard]] std::uint64_t digest_of(const std::byte* data, std::size_t bytes,
                                        std::uint64_t seed = 0);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Whether this build has DeviceStats.
[[nodiscard]] bool has_device_stats() noexcept;

}  // namespace isoshard
