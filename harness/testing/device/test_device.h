// SPDX-License-Identifier: Apache-2.0
/// A device of LibTorch that is not the CPU and needs no GPU: its memory is the host's, its kernels
/// are the CPU's, and what a GPU refuses it refuses.
///
/// Device "test_device:0". A tensor is on it or in host memory, as with CUDA: an operation whose
/// tensors are on both is an error that names it, but for copies, indices, and tensors of no
/// dimension. Autograd runs the backward pass on the device's own thread, as it does for CUDA, so
/// a process must be forked before its first backward pass. Results are the CPU's, bit by bit.
#pragma once
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>

namespace isoshard {

/// Registers the device, once a process. Call it before the first backward pass.
[[nodiscard]] c10::Device test_device();

/// Whether all of these bytes are memory that the device has allocated. From any thread.
[[nodiscard]] bool is_on_test_device(const std::byte* data, std::size_t bytes);

/// How many bytes of tensors this process, and none that it forked, has copied from the device to
/// host memory. From any thread.
[[nodiscard]] std::int64_t bytes_from_test_device() noexcept;

}  // namespace isoshard
