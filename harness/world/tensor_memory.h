// SPDX-License-Identifier: Apache-2.0
/// Tensors of ranks: large ones lie in the program's pool, and what nobody has written is NaN.
#pragma once
#include <sys/types.h>

#include <cstdint>

namespace isoshard {

/// Rank side: from now on each tensor that this process allocates is filled with the unwritten_word
/// (src/core/memory/unwritten.h) of `run`, a number that the next run of the same subject does not
/// have. at::zeros and the like write over it. Memory that LibTorch's kernels take elsewhere for
/// themselves, and what comes from malloc or new, is as it was.
///
/// Tensors are allocated from the pool if they have 2 MiB or more and it has room. A process that
/// this one forks later shares the tensors that it had then, instead of having copies of its own.
/// There is no pool in builds with an address sanitizer.
/// Ranks   called once, before the first tensor.
void prepare_tensor_memory(std::uint64_t run);

/// Controller side: call it after the process has been reaped. If memory is short, free memory is
/// given back to the system.
void reclaim_tensor_memory(pid_t gone);

}  // namespace isoshard
