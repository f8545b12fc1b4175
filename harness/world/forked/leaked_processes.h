// SPDX-License-Identifier: Apache-2.0
/// Processes that ranks start and leave behind, daemons included: found, named, killed.
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

/// Kills and reaps every child that is not in `known`, and what they leave behind, until there is
/// none. Returns "process 123 (sleep), process 124 (daemon)" for those that were alive; empty if
/// there was none. Zombies are only reaped; one that is still there after a bound is named as that
/// and left.
[[nodiscard]] std::string end_leaked_processes(std::set<pid_t> known);

}  // namespace isoshard
