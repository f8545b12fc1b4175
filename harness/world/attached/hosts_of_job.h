// SPDX-License-Identifier: Apache-2.0
/// Which processes of a job share memory, and a segment for each host.
#pragma once
#include <memory>
#include <string>

#include "core/comm/communicator.h"
#include "core/memory/memory_pool.h"
#include "harness/world/launcher.h"

namespace isoshard {

struct HostsOfJob {
  Hosts hosts;
  /// Of this process's host, in one named segment of /dev/shm; null where the process is alone.
  std::shared_ptr<MemoryPool> memory;
};

/// A host is a name and a memory: its processes say that they have one name, and each has opened
/// the segment of the first of them and found in it the random token that this one has sent. So
/// containers with one name but a /dev/shm each are hosts of their own, and so are names that share
/// a /dev/shm. A process that cannot have a segment is a host of its own, too.
///
/// Ranks        collective over `comm`.
/// Guarantees   the names of segments are gone when it returns, so no killed process leaves one.
///              What a process left that was killed in here is removed by the next job of the same
///              user on that host.
[[nodiscard]] HostsOfJob find_hosts(Communicator& comm, const std::string& host);

}  // namespace isoshard
