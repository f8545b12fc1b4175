// SPDX-License-Identifier: Apache-2.0
// LibTorch's default CPU allocator with a count: what ranks otherwise allocate is filled first
// (harness/world/tensor_memory.h), which costs time. A block's size is what malloc says of it, so
// that nothing has to be kept beside the block.
#include "suite/bench/counted_memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <malloc.h>

#include <atomic>
#include <cstring>

#include "core/base/error.h"

namespace isoshard {
namespace {

c10::Allocator* usual_allocator = nullptr;
c10::DeviceAllocator* of_device = nullptr;  ///< that counts for itself
c10::DeviceIndex device_index = 0;
std::atomic<std::int64_t> allocated{0}, peak{0};

void add(std::int64_t bytes) noexcept {
  const std::int64_t now = allocated.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  std::int64_t most = peak.load(std::memory_order_relaxed);
  while (now > most && !peak.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
  }
}

void release(void* block) {
  if (block != nullptr)
    allocated.fetch_sub(static_cast<std::int64_t>(::malloc_usable_size(block)),
                        std::memory_order_relaxed);
  usual_allocator->raw_deleter()(block);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr block = usual_allocator->allocate(bytes);
    void* const data = block.release_context();
    if (data != nullptr) add(static_cast<std::int64_t>(::malloc_usable_size(data)));
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  [[nodiscard]] c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

void count_tensor_memory(c10::Device device) {
  if (!device.is_cpu()) {
    of_device = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
    if (of_device == nullptr)
      throw NotBuiltError("the allocator of " + device.str() + " must count what it allocates");
    device_index = device.index();
    return;
  }
  static CountingAllocator allocator;
  usual_allocator = c10::GetDefaultCPUAllocator();
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
}

TensorBytes tensor_bytes() {
  if (of_device != nullptr) {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto bytes = of_device->getDeviceStats(device_index).allocated_bytes[kAll];
    return {bytes.current, bytes.peak};
  }
  return {allocated.load(std::memory_order_relaxed), peak.load(std::memory_order_relaxed)};
}

void reset_peak_tensor_bytes() {
  if (of_device != nullptr) return of_device->resetPeakStats(device_index);
  peak.store(allocated.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

}  // namespace isoshard
