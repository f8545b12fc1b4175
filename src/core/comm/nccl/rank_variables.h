// SPDX-License-Identifier: Apache-2.0
/// What torchrun, mpirun or srun say in the environment about this process: its rank, and where
/// ranks meet. No library of MPI is needed to read it.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

namespace isoshard {

struct RankVariables {
  int rank = 0;
  int size = 1;
  int local_rank = 0;     ///< among the processes of its host: the number of its device
  int local_size = 1;     ///< processes of its host, as far as the launcher says
  std::string address{};  ///< of rank 0
  int port = 0;           ///< at which rank 0 listens
  /// Of rank 0, if whoever started it has opened it; else -1.
  int listening_socket = -1;
  std::uint64_t job = 0;   ///< equal on all processes of the job
  std::string launcher{};  ///< "torchrun", "mpirun", "srun"
};

/// torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Where its agent keeps a store
/// of its own at MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE), ranks meet one port above.
/// mpirun, srun: their own variables; MASTER_ADDR is needed if they are on several hosts, and
/// MASTER_PORT is 29500 if it is not set. ISOSHARD_MASTER_PORT always names the port to meet at,
/// and ISOSHARD_MASTER_SOCKET a descriptor of rank 0 that listens there already.
///
/// Ranks    local. `environment` is std::getenv, or a test's.
/// Errors   UsageError where nobody started this process as a rank, a variable is missing or no
///          number in its range, or two launchers contradict each other.
[[nodiscard]] RankVariables read_rank_variables(
    const std::function<const char*(const char*)>& environment);

}  // namespace isoshard
