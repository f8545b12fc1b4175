// SPDX-License-Identifier: Apache-2.0
/// Rank processes that are forked once and live for all worlds of a program.
#pragma once
#include <chrono>
#include <functional>
#include <vector>

namespace isoshard {

/// How one of them ended.
struct PersistentRank {
  int code = 0;    ///< what `body` returned; that of its exit, if it left otherwise
  int signal = 0;  ///< that ended it; 0: none
};

/// Forks `num_ranks` processes, each of which runs `body` to its end with the variables of torchrun
/// that say who it is (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
/// so that they can meet as a job (attach_nccl_job). Those of other launchers are taken away. The
/// caller does nothing but wait; SIGINT, SIGTERM and SIGHUP go to all of them.
///
/// A rank that a signal ends is not started again: the others see in a call that it is gone, and
/// end. Those that are still there `grace` later get SIGTERM, and after as long again SIGKILL:
/// whoever waits for all to meet knows of none that is gone.
///
/// Requires     a process with one thread that has not started CUDA.
/// Guarantees   the processes end with the caller, also when it is killed.
/// Ranks        called by the controller.
/// Errors       UsageError for a number that is not from 1 to 1024; InfrastructureError if a
/// process
///              cannot be started.
[[nodiscard]] std::vector<PersistentRank> run_persistent_ranks(
    int num_ranks, const std::function<int()>& body,
    std::chrono::milliseconds grace = std::chrono::seconds(10));

}  // namespace isoshard
