// SPDX-License-Identifier: Apache-2.0
/// Memory of devices, for code that names none.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstddef>

namespace isoshard {

/// Gives a storage `bytes` new bytes of its own device, or frees them (0). What it held is lost.
/// Tensors over it keep their shapes; autograd is not told.
void resize_storage(const c10::Storage& storage, std::size_t bytes);

/// Copies bytes between a device and host memory; returns when both may be touched again.
void copy_to_host(std::byte* host, const std::byte* device, std::size_t bytes, c10::Device from);
void copy_to_device(std::byte* device, const std::byte* host, std::size_t bytes, c10::Device to);

/// Returns when the device has done all that this process has asked of it, on any stream.
void synchronize(c10::Device device);

/// Of rank `rank` of a world on the devices that LibTorch has in this process beside the CPU: CUDA,
/// in turn over the GPUs, or in tests the device that they registered.
/// Errors   NotBuiltError if there is none, with what to do.
[[nodiscard]] c10::Device device_of_rank(int rank);

/// Whether LibTorch was loaded with a device beside the CPU, whether the machine has one or not.
/// Where it has, autograd starts a thread for each at the first backward pass, after which a
/// process cannot fork ranks that train. Starts nothing itself.
[[nodiscard]] bool has_devices() noexcept;

}  // namespace isoshard
