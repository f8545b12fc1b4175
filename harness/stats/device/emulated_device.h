// SPDX-License-Identifier: Apache-2.0
/// A ComparingDevice for tests: memory of its own in the host's, and the emulated grid.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "harness/stats/device/device_comparer.h"
#include "harness/stats/device/emulated_grid.h"

namespace isoshard::device {

/// What was asked of an EmulatedDevice.
struct DeviceCalls {
  int uploads = 0;
  std::int64_t bytes_uploaded = 0;
  int comparisons = 0;
};

class EmulatedDevice final : public ComparingDevice {
 public:
  explicit EmulatedDevice(DeviceCalls& calls) : calls_(&calls) {}

  const std::byte* upload(Buffer buffer, const std::byte* host, std::size_t bytes) override {
    ++calls_->uploads;
    calls_->bytes_uploaded += static_cast<std::int64_t>(bytes);
    std::vector<std::byte>& memory = memory_[static_cast<std::size_t>(buffer)];
    memory.assign(host, host + bytes);
    return memory.data();
  }
  void accumulate(Stats& stats, const std::byte* reference, Dtype reference_dtype,
                  const std::byte* actual, Dtype actual_dtype, std::int64_t count,
                  std::int64_t index, double grad_scale, const std::uint8_t* selected) override {
    ++calls_->comparisons;
    emulate_accumulate(stats, reference, reference_dtype, actual, actual_dtype, count, index,
                       grad_scale, selected);
  }

 private:
  DeviceCalls* calls_;
  std::array<std::vector<std::byte>, 3> memory_;  ///< one for each Buffer
};

/// A comparer that runs the control flow of the GPU's on this CPU. `calls` must outlive it.
inline std::unique_ptr<Comparer> emulated_comparer(DeviceCalls& calls) {
  return comparer_on(std::make_unique<EmulatedDevice>(calls));
}

}  // namespace isoshard::device
