// SPDX-License-Identifier: Apache-2.0
/// The reductions of gathered data as kernels of CUDA.
#pragma once
#include <cuda_runtime_api.h>

#include "core/comm/nccl/gathered_reduction.h"

namespace isoshard {

/// Starts the task on the stream; all addresses are the device's.
[[nodiscard]] cudaError_t launch_reduction(const GatheredReduction& task, cudaStream_t stream);

}  // namespace isoshard
