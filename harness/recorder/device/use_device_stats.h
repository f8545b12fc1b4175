// SPDX-License-Identifier: Apache-2.0
/// Statistics and digests on GPUs, for programs that are linked with CUDA.
#pragma once

namespace isoshard {

/// From now on recorders of this process, and of those that it forks, make digests of CUDA tensors
/// on their GPU (harness/recorder/device_digest.h), and gpu_comparer() (harness/stats/comparer.h)
/// compares on the current one. Starts nothing of CUDA itself.
/// Ranks    called by the program, before it starts ranks.
void use_device_stats();

}  // namespace isoshard
