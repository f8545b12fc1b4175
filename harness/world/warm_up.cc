// SPDX-License-Identifier: Apache-2.0
/// A toy step through the kernels that models use.
#include "harness/world/warm_up.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <malloc.h>

#include <cstdlib>
#include <limits>

namespace isoshard {

void make_controller() {
  // Fresh memory costs more than many an operation on it: the kernel clears it, and a virtual machine's host may have to find it. So big
  // tensors come in huge pages (LibTorch reads this at its first allocation), and what is freed below 32 MiB (the allocator's limit for
  // this) stays the process's own, for the next tensor of any thread.
  constexpr int kMostKept = 32 << 20;
  ::setenv("THP_MEM_ALLOC_ENABLE", "1", /*overwrite=*/0);
  ::mallopt(M_MMAP_THRESHOLD, kMostKept);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  ::mallopt(M_ARENA_MAX, 1);
  at::set_num_threads(1);
}

void warm_up_kernels() {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = at::ones({4, 8}, at::TensorOptions().dtype(dtype));
    const at::Tensor weight = at::ones({8, 8}, at::TensorOptions().dtype(dtype)).requires_grad_();
    const at::Tensor hidden = at::silu(at::matmul(x, weight.t()));
    at::softmax(hidden, -1).mul(hidden).sum().backward();
  }
}

}  // namespace isoshard
