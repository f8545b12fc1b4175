// SPDX-License-Identifier: Apache-2.0
/// Large tensors of ranks are allocated from the program's pool.
#pragma once
#include <sys/types.h>

namespace isoshard {

/// Rank side: tensors of this process are allocated from the pool if they have 2 MiB or more and it
/// has room. A process that it forks later shares the tensors that it had then, instead of having
/// copies of its own. Nothing happens where there is no pool, and in builds with an address
/// sanitizer, which has an allocator of its own.
void use_pool_for_tensors();

/// Controller side: call it after the process has been reaped. If memory is short, free memory is
/// given back to the system.
void reclaim_tensor_memory(pid_t gone);

}  // namespace isoshard
