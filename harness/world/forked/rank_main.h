// SPDX-License-Identifier: Apache-2.0
/// The main function of a rank's process, from the fork to its end.
#pragma once
#include <sys/types.h>

#include <cstdint>
#include <vector>

#include "core/comm/transport.h"
#include "harness/world/forked/forked_world.h"
#include "harness/world/forked/leaked_processes.h"
#include "harness/world/forked/rank_slot.h"

namespace isoshard {

struct RankStart {
  int rank = 0;
  std::uint64_t world_number = 0;  ///< of the worlds that the controller started
  pid_t controller = 0;
  int channel = -1;          ///< this rank's end of the result channel
  int tether = -1;           ///< read end of a pipe that only the controller can write to
  DescentMark mark = 0;      ///< of the world
  int standard_output = -1;  ///< write ends of the pipes
  int standard_error = -1;
  std::vector<int> to_close;  ///< the controller's descriptors, which no rank may hold
  RankSlot* slot = nullptr;
  CommWorld* world = nullptr;
  const WorldOptions* options = nullptr;
  const ForkedWorld::Body* body = nullptr;
};

/// Runs the body, reports how it ended, flushes buffered output, and ends the process.
[[noreturn]] void rank_main(const RankStart& start) noexcept;

/// Calls the hooks that are set, for a world of this size, in the controller.
void call_world_hooks(int size);

}  // namespace isoshard
