// SPDX-License-Identifier: Apache-2.0
/// Small helpers for tests of worlds: a collective, a hang, and what a process holds.
#pragma once
#include <dirent.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <fstream>
#include <string>

#include "core/comm/communicator.h"
#include "harness/world/rank.h"

namespace isoshard {

/// The sum of every rank's value: one collective.
inline double summed(Rank& rank, double value) {
  const CallInfo info{.purpose = Purpose::kLossReduce, .axis = Axis::kWorld};
  rank.comm()
      .all_reduce({reinterpret_cast<std::byte*>(&value), 1, Dtype::kFloat64}, Reduction::kSum, info)
      .wait();
  return value;
}

/// Never returns; burns time as a real endless loop does.
[[noreturn]] inline void loop_for_ever() {
  std::atomic<unsigned> count{0};
  for (;;) count.fetch_add(1, std::memory_order_relaxed);
}

/// What a process holds, to compare before with after.
struct Traces {
  int descriptors = 0;
  std::string children;  ///< pids, zombies included
  bool operator==(const Traces&) const = default;
};

inline void PrintTo(const Traces& traces, std::ostream* out) {
  *out << traces.descriptors << " descriptors, children: \"" << traces.children << "\"";
}

inline Traces traces_of_process() {
  Traces traces;
  DIR* folder = ::opendir("/proc/self/fd");
  while (folder != nullptr && ::readdir(folder) != nullptr) ++traces.descriptors;
  if (folder != nullptr) ::closedir(folder);
  std::ifstream children("/proc/thread-self/children");
  std::getline(children, traces.children);
  return traces;
}

}  // namespace isoshard
