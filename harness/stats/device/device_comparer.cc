// SPDX-License-Identifier: Apache-2.0
/// Pairs go to the device as a whole, runs are compared there one after the other.
#include "harness/stats/device/device_comparer.h"

#include <utility>

namespace isoshard {
namespace {

std::int64_t elements_of(std::span<const ComparedRun> runs) {
  std::int64_t elements = 0;
  for (const ComparedRun& run : runs) elements += run.count;
  return elements;
}

class DeviceComparer final : public Comparer {
 public:
  explicit DeviceComparer(std::unique_ptr<ComparingDevice> device) : device_(std::move(device)) {}

  void accumulate(Stats& stats, const ComparedPair& pair,
                  std::span<const ComparedRun> runs) override {
    using Buffer = ComparingDevice::Buffer;
    const std::int64_t elements = elements_of(runs);
    if (elements == 0) return;
    const auto reference_size = static_cast<std::int64_t>(size_of(pair.reference_dtype));
    const auto actual_size = static_cast<std::int64_t>(size_of(pair.actual_dtype));
    const auto bytes = [&](std::int64_t size) { return static_cast<std::size_t>(elements * size); };
    const std::byte* const reference =
        device_->upload(Buffer::kReference, pair.reference, bytes(reference_size));
    const std::byte* const actual =
        device_->upload(Buffer::kActual, pair.actual, bytes(actual_size));
    const std::uint8_t* selected = nullptr;
    if (pair.selected != nullptr) {
      const auto* const host = reinterpret_cast<const std::byte*>(pair.selected);
      selected =
          reinterpret_cast<const std::uint8_t*>(device_->upload(Buffer::kSelected, host, bytes(1)));
    }
    std::int64_t done = 0;
    for (const ComparedRun& run : runs) {
      device_->accumulate(stats, reference + done * reference_size, pair.reference_dtype,
                          actual + done * actual_size, pair.actual_dtype, run.count, run.index,
                          pair.grad_scale, selected == nullptr ? nullptr : selected + done);
      done += run.count;
    }
  }

 private:
  std::unique_ptr<ComparingDevice> device_;
};

}  // namespace

std::unique_ptr<Comparer> comparer_on(std::unique_ptr<ComparingDevice> device) {
  return std::make_unique<DeviceComparer>(std::move(device));
}

}  // namespace isoshard
