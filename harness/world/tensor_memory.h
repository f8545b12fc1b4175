// SPDX-License-Identifier: Apache-2.0
/// Big tensors of ranks out of the program's pool.
#pragma once
#include <sys/types.h>

namespace isoshard {

/// Rank side: tensors of this process come out of the pool, where they are of 2 MiB and more and it
/// has room. A process that it forks later shares the tensors that it had then, instead of having
/// copies of its own. Nothing happens where there is no pool, and in builds with an address
/// sanitizer, which has an allocator of its own.
void use_pool_for_tensors();

/// Controller side: the process has been reaped. Where memory is short, what is free goes back to
/// the system.
void reclaim_tensor_memory(pid_t gone);

}  // namespace isoshard
