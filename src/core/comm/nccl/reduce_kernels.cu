// SPDX-License-Identifier: Apache-2.0
/// One thread an element, in steps of the whole grid.
#include "core/comm/nccl/reduce_kernels.h"

#include <algorithm>

namespace isoshard {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 1024;

template <class T, Reduction kReduction>
__global__ void reduce_kernel(GatheredReduction task) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < task.count; i += step)
    reduce_element<T, kReduction>(task, i);
}

struct Launch {
  GatheredReduction task;
  cudaStream_t stream;
  template <class T, Reduction kReduction>
  void operator()() const {
    const std::int64_t blocks = std::min(kMaxBlocks, (task.count + kThreads - 1) / kThreads);
    reduce_kernel<T, kReduction><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(task);
  }
};

}  // namespace

cudaError_t launch_reduction(const GatheredReduction& task, cudaStream_t stream) {
  if (task.count == 0) return cudaSuccess;
  with_types_of(task, Launch{task, stream});
  return cudaGetLastError();
}

}  // namespace isoshard
