// SPDX-License-Identifier: Apache-2.0
/// How many bytes of tensors a process holds, and held at most.
#pragma once
#include <c10/core/Device.h>

#include <cstdint>

namespace isoshard {

struct TensorBytes {
  std::int64_t allocated = 0, peak = 0;
};

/// Counts the tensors that this process allocates on the device from now on, as
/// torch.cuda.memory_allocated and max_memory_allocated count those of a GPU. Of the CPU what
/// kernels take for themselves from malloc is not counted. On a GPU LibTorch's allocator counts,
/// and tensors in host memory are not.
/// Ranks    called once, in the rank's process, before its first tensor.
/// Errors   NotBuiltError for a device whose allocator does not count.
void count_tensor_memory(c10::Device device = c10::Device(c10::DeviceType::CPU));

/// Of this process, from any thread.
[[nodiscard]] TensorBytes tensor_bytes();
/// From now on the peak begins with what is allocated.
void reset_peak_tensor_bytes();

}  // namespace isoshard
