// SPDX-License-Identifier: Apache-2.0
/// The course of a test program whose ranks are forked at its start and live for all of its tests.
#pragma once
#include "core/comm/nccl/gpu_api.h"

namespace isoshard {

/// Makes the GPU of a rank, in its process.
using GpuOfRank = GpuApiFactory;

/// `--ranks=N` (needed) and `--buffers=host` or `device`, then what GoogleTest takes. Rank 0 prints
/// and writes reports; what other ranks print is shown if one fails. Each rank runs the same tests,
/// and the program fails if one fails anywhere, a rank dies, or no world ran.
///
/// Ranks   called by main(), before any thread.
[[nodiscard]] int run_on_gpu_ranks(int argc, char** argv, const GpuOfRank& gpu_of_rank);

}  // namespace isoshard
