// SPDX-License-Identifier: Apache-2.0
/// Rank processes that are forked once and live for all worlds of a program.
#pragma once
#include <chrono>
#include <functional>
#include <vector>

namespace isoshard {

/// How one of them ended.
struct PersistentRank {
  int code = 0;           ///< what `body` returned; that of its exit, if it left otherwise
  int signal = 0;         ///< that ended it; 0: none
  bool was_told = false;  ///< to end, because another rank broke before
};

/// Forks `num_ranks` processes, each of which runs `body` to its end with the variables of torchrun
/// that say who it is (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
/// so that they can meet as a job (attach_nccl_job). Those of other launchers are taken away. The
/// caller does nothing but wait. SIGINT, SIGTERM and SIGHUP go to all of them, unless the caller
/// ignores them.
///
/// A rank that breaks (a signal ends it, or its code is not that of a verdict: 0, 1 or 5) is not
/// started again. The others see in their next call that it is gone, and end. Those that are still
/// there `grace` later get SIGTERM, and after as long again SIGKILL: ranks that have yet to meet do
/// not learn that one of them has ended. What `body` throws is told, and ends the rank with code 4.
///
/// Requires     a process with one thread that has not started CUDA.
/// Guarantees   the processes end with the caller, also when it is killed.
/// Ranks        called by the controller.
/// Errors       UsageError for a number that is not from 1 to 1024; InfrastructureError where a
///              process cannot be started.
[[nodiscard]] std::vector<PersistentRank> run_persistent_ranks(
    int num_ranks, const std::function<int()>& body,
    std::chrono::milliseconds grace = std::chrono::seconds(10));

}  // namespace isoshard
