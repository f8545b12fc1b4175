// SPDX-License-Identifier: Apache-2.0
/// A toy step through the kernels that models use.
#include "harness/world/warm_up.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <limits>

#include "core/tensor/device.h"

namespace isoshard {
namespace {

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// LibTorch allocates tens of MiB in small pieces as it is loaded. In pages of 4 KiB that takes ten
// thousand faults, and each fork copies as many entries; and a rank touches some MiB more. So the
// heap begins with a reserve of huge pages, of which only what is touched is obtained. It has to be
// there before any library allocates.
void reserve_heap(int, char**, char**) {
  constexpr int kReserve = 96 << 20;
  constexpr std::uintptr_t kHugePage = 2 << 20;
  ::mallopt(M_TOP_PAD, kReserve);
  void* const first = std::malloc(1);
  const std::uintptr_t begin =
      (reinterpret_cast<std::uintptr_t>(first) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = reinterpret_cast<std::uintptr_t>(::sbrk(0)) / kHugePage * kHugePage;
  // refused: small pages do, too
  if (begin < end) (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  std::free(first);
}

using Initializer = void (*)(int, char**, char**);
__attribute__((section(".preinit_array"), used)) const Initializer kBeforeLibraries = &reserve_heap;
#endif

}  // namespace

void make_controller() {
  // Fresh memory costs more than many an operation on it: the kernel clears it, and a virtual
  // machine's host may have to find it. So big tensors come in huge pages (LibTorch reads this at
  // its first allocation), and what is freed below 32 MiB (the allocator's limit for this) stays
  // the process's own.
  constexpr int kMostKept = 32 << 20;
  ::setenv("THP_MEM_ALLOC_ENABLE", "1", /*overwrite=*/0);
  ::mallopt(M_MMAP_THRESHOLD, kMostKept);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  at::set_num_threads(1);
}

void warm_up_kernels() {
  if (has_devices()) return;  // after a backward pass the process could not fork ranks
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = at::ones({4, 8}, at::TensorOptions().dtype(dtype));
    const at::Tensor weight = at::ones({8, 8}, at::TensorOptions().dtype(dtype)).requires_grad_();
    const at::Tensor hidden = at::silu(at::matmul(x, weight.t()));
    at::softmax(hidden, -1).mul(hidden).sum().backward();
  }
}

}  // namespace isoshard
