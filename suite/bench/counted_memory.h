// SPDX-License-Identifier: Apache-2.0
/// How many bytes of tensors a process holds, and held at most.
#pragma once
#include <cstdint>

namespace isoshard {

struct TensorBytes {
  std::int64_t allocated = 0, peak = 0;
};

/// Counts the tensors that this process allocates from now on, as
/// torch.cuda.memory_allocated and max_memory_allocated count those of a GPU. Not counted is what
/// kernels take for themselves from malloc.
/// Ranks   called once, in the rank's process, before its first tensor.
void count_tensor_memory();

/// Of this process, from any thread.
[[nodiscard]] TensorBytes tensor_bytes() noexcept;
/// From now on the peak begins with what is allocated.
void reset_peak_tensor_bytes() noexcept;

}  // namespace isoshard
