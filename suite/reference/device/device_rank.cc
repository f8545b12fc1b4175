// SPDX-License-Identifier: Apache-2.0
// Settings and staging of one rank.
#include "suite/reference/device/device_rank.h"

#include "core/comm/nccl/nccl_world.h"
#include "core/comm/staged/staged_communicator.h"
#include "core/tensor/device.h"
#include "fixtures/cases/device_settings.h"

namespace isoshard {

DeviceRank::DeviceRank(const Case& c, Communicator& world) : world_(&world) {
  if (c.device == Device::Kind::kCpu) return;
  pin_.emplace(device_settings_of(c));
  // Not where a fault is on the communicator: faults change data in host memory.
  if (takes_device_memory(world)) return;
  // LibTorch's copies, on the stream that is current: what was enqueued there before is in them.
  const c10::DeviceType type = device_of_rank(0).type();
  const auto device_of = [type](const Device& device) {
    return c10::Device(type, static_cast<c10::DeviceIndex>(device.index));
  };
  staged_ = staged(
      world,
      {.to_host = [device_of](
                      std::byte* host, const std::byte* device, std::size_t bytes,
                      const Device& from) { copy_to_host(host, device, bytes, device_of(from)); },
       .to_device = [device_of](
                        std::byte* device, const std::byte* host, std::size_t bytes,
                        const Device& to) { copy_to_device(device, host, bytes, device_of(to)); }});
}

void DeviceRank::check() const {
  if (pin_.has_value()) pin_->check();
}

}  // namespace isoshard
