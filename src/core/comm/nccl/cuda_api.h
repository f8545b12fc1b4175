// SPDX-License-Identifier: Apache-2.0
/// The functions of CUDA and NCCL themselves, for programs that run on GPUs (library
/// isoshard::comm_nccl_cuda).
#pragma once
#include <memory>
#include <string>

#include "core/comm/nccl/gpu_api.h"

namespace isoshard {

/// Starts CUDA in this process, which must not fork afterwards. Where the host has fewer GPUs than
/// ranks, it sets the variables with which NCCL lets ranks share one, unless they are set:
/// each rank says that it is a host of its own, and bytes go through sockets
/// (docs/reference/nccl.md). Errors   GpuError.
[[nodiscard]] std::shared_ptr<GpuApi> make_cuda_api(int local_rank, int local_size);

/// Backend nccl is there from now on. Called by main(), before any rank; starts nothing.
void use_cuda();

/// Why CUDA finds no GPU, in its own words; empty if it finds one. A process of its own asks, so
/// that this one may still fork.
[[nodiscard]] std::string why_no_gpu();

}  // namespace isoshard
