// SPDX-License-Identifier: Apache-2.0
/// Finds, names and kills processes that ranks start and leave running, daemons included.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <set>
#include <string>

namespace isoshard {

/// From now on orphaned descendants of this process become its children (until the process ends;
/// not inherited by fork).
void adopt_orphans() noexcept;

/// Whether this process adopts orphans; and makes it as it was.
[[nodiscard]] bool is_adopting_orphans() noexcept;
void set_adopting_orphans(bool adopts) noexcept;

/// A mark that the kernel hands on from a process to all that it starts, through fork, exec, setsid
/// and closed descriptors: the soft limit RLIMIT_LOCKS, which limits nothing since Linux 2.4.
using DescentMark = std::uint64_t;
/// One that no other world has.
[[nodiscard]] DescentMark new_descent_mark() noexcept;
/// This process and what it starts from now on has the mark. Without effect under a hard limit
/// below it; what a crashed rank leaves behind is then not found.
void wear_mark(DescentMark mark) noexcept;

/// What became of processes that were left behind.
struct LeakedProcesses {
  /// "process 123 (sleep), process 124 (daemon)" for those that were alive; empty if there was
  /// none.
  std::string words;
  bool all_gone = true;  ///< else one is still there after a time limit; it is left alone
};

/// Kills and reaps every child of this process, and the processes that these leave running, until
/// there is none. Zombies are only reaped. For ranks: what a rank has is its own.
[[nodiscard]] LeakedProcesses end_all_children();

/// The same for those children only that wear the mark and are not in `known`: other children are
/// the program's own, whenever it started them.
[[nodiscard]] LeakedProcesses end_marked_children(DescentMark mark, std::set<pid_t> known);

}  // namespace isoshard
