// SPDX-License-Identifier: Apache-2.0
/// Storages and copies by what LibTorch registers for each device.
#include "core/tensor/device.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>

#include "core/base/error.h"

namespace isoshard {
namespace {

constexpr c10::DeviceType kTypes[] = {c10::DeviceType::CUDA, c10::DeviceType::PrivateUse1};

at::Tensor bytes_at(const std::byte* data, std::size_t bytes, c10::Device device) {
  // ATen has no read-only tensors.
  return at::from_blob(
      const_cast<std::byte*>(data), {static_cast<std::int64_t>(bytes)}, [](void*) {},
      at::TensorOptions().dtype(at::kByte).device(device), device);
}

}  // namespace

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  c10::StorageImpl& own = *storage.unsafeGetStorageImpl();
  own.set_data_ptr_noswap(own.allocator()->allocate(bytes));
  own.set_nbytes(bytes);
}

void copy_to_host(std::byte* host, const std::byte* device, std::size_t bytes, c10::Device from) {
  if (bytes == 0) return;
  bytes_at(host, bytes, c10::Device(c10::DeviceType::CPU)).copy_(bytes_at(device, bytes, from));
}

void copy_to_device(std::byte* device, const std::byte* host, std::size_t bytes, c10::Device to) {
  if (bytes == 0) return;
  bytes_at(device, bytes, to).copy_(bytes_at(host, bytes, c10::Device(c10::DeviceType::CPU)));
}

void synchronize(c10::Device device) {
  if (!device.is_cpu())
    c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
}

c10::Device device_of_rank(int rank) {
  for (const c10::DeviceType type : kTypes) {
    if (!c10::impl::hasDeviceGuardImpl(type)) continue;
    const int count = c10::impl::getDeviceGuardImpl(type)->deviceCount();
    if (count > 0) return {type, static_cast<c10::DeviceIndex>(rank % count)};
  }
  throw NotBuiltError(
      "device cuda must be a GPU that this process can use, got none; see isoshard doctor, or take "
      "--device cpu");
}

bool has_devices() noexcept {
  return std::ranges::any_of(kTypes, &c10::impl::hasDeviceGuardImpl);
}

}  // namespace isoshard
