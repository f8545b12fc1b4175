// SPDX-License-Identifier: Apache-2.0
/// A Comparer (harness/stats/comparer.h) that compares on a device.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "harness/stats/comparer.h"
#include "harness/stats/stats.h"

namespace isoshard {

/// What a comparer needs of a device: memory, and accumulate() there. A GPU, or the emulated grid
/// of tests.
class ComparingDevice {
 public:
  enum class Buffer : std::uint8_t { kReference, kActual, kSelected };

  ComparingDevice() = default;
  virtual ~ComparingDevice() = default;
  ComparingDevice(const ComparingDevice&) = delete;
  ComparingDevice& operator=(const ComparingDevice&) = delete;

  /// Copies bytes of host memory, which may be touched again when the call returns. What it gives
  /// back holds until the next upload to the same buffer.
  /// Errors   InfrastructureError, as when the device's memory is short.
  virtual const std::byte* upload(Buffer buffer, const std::byte* host, std::size_t bytes) = 0;
  /// As the function of the same name, of pointers of the device.
  /// Errors   InfrastructureError with the device's words.
  virtual void accumulate(Stats& stats, const std::byte* reference, Dtype reference_dtype,
                          const std::byte* actual, Dtype actual_dtype, std::int64_t count,
                          std::int64_t index, double grad_scale, const std::uint8_t* selected) = 0;
};

/// Each pair is copied to the device once, and each of its runs is compared there on its own: only
/// so are its sums those of accumulate().
[[nodiscard]] std::unique_ptr<Comparer> comparer_on(std::unique_ptr<ComparingDevice> device);

/// The current CUDA device of this process, on a stream of its own.
/// Errors   as DeviceStats.
[[nodiscard]] std::unique_ptr<ComparingDevice> comparing_gpu();

}  // namespace isoshard
