// SPDX-License-Identifier: Apache-2.0
/// Finds, names and kills processes that ranks start and leave running, daemons included.
#pragma once
#include <sys/types.h>

#include <set>
#include <string>

namespace isoshard {

/// From now on orphaned descendants of this process become its children (until the process ends;
/// not inherited by fork).
void adopt_orphans() noexcept;

/// The children of this process, zombies included. Empty at the cost of one system call if there
/// are none.
[[nodiscard]] std::set<pid_t> children_of_process();

/// Kills and reaps every child that is not in `known`, and the processes that these leave running,
/// until there is none. Returns "process 123 (sleep), process 124 (daemon)" for those that were
/// alive; empty if there was none. Zombies are only reaped. A child that is still there after a
/// time limit is named as such and left alone.
[[nodiscard]] std::string end_leaked_processes(std::set<pid_t> known);

}  // namespace isoshard
