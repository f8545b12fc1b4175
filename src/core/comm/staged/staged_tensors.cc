// SPDX-License-Identifier: Apache-2.0
/// Copies by LibTorch.
#include "core/comm/staged/staged_tensors.h"

#include "core/comm/staged/staged_communicator.h"
#include "core/tensor/device.h"

namespace isoshard {
namespace {

/// The device of LibTorch that a Buffer's stands for.
c10::Device tensor_device(const Device& device) {
  return {device_of_rank(0).type(), static_cast<c10::DeviceIndex>(device.index)};
}

}  // namespace

std::unique_ptr<Communicator> staged_tensors(Communicator& inner) {
  return staged(
      inner,
      {.to_host =
           [](std::byte* host, const std::byte* device, std::size_t bytes, const Device& from) {
             copy_to_host(host, device, bytes, tensor_device(from));
           },
       .to_device =
           [](std::byte* device, const std::byte* host, std::size_t bytes, const Device& to) {
             copy_to_device(device, host, bytes, tensor_device(to));
           }});
}

}  // namespace isoshard
