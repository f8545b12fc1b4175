// SPDX-License-Identifier: Apache-2.0
/// The backends by name, and the factories of those that a build may lack.
#pragma once
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "core/comm/communicator.h"

namespace isoshard {

enum class Backend : std::uint8_t { kShm, kThread, kMpi, kNccl };

/// shm, thread, mpi, nccl.
[[nodiscard]] std::string_view name_of(Backend backend) noexcept;

/// Errors   UsageError that lists the names.
[[nodiscard]] Backend parse_backend(std::string_view name);

struct AttachOptions {
  int expected_size = 0;  ///< ranks that the world must have; 0: any number
  ReductionOrder order = ReductionOrder::kOrdered;
  /// Of this process's clock
  std::optional<std::chrono::steady_clock::time_point> deadline{};
};

/// The communicator of the world that mpirun or srun started (library isoshard::comm_mpi). MPI ends
/// when the process exits: a rank whose world was aborted ends all of them, with exit code 4.
/// Ranks    collective over all processes that the launcher started.
/// Errors   NotBuiltError in a build without MPI; UsageError where no launcher of MPI started this
///          process, torchrun's or Slurm's variables contradict MPI, or the size is not expected.
[[nodiscard]] std::unique_ptr<Communicator> attach_mpi_world(const AttachOptions& options = {});
/// Empty where attach_mpi_world is built; starts nothing.
[[nodiscard]] std::string_view why_mpi_is_not_built() noexcept;

/// The communicator of the world that torchrun, mpirun or srun started, over NCCL, for buffers of
/// the rank's GPU and of the host (library isoshard::comm_nccl). It needs no library of MPI.
/// Ranks    collective over all processes that the launcher started.
/// Errors   NotBuiltError in a program without CUDA and NCCL; UsageError where no launcher started
///          this process, its variables contradict each other, or the size is not expected;
///          TimeoutError that names the ranks which have not come by the deadline.
[[nodiscard]] std::unique_ptr<Communicator> attach_nccl_world(const AttachOptions& options = {});
/// Empty where attach_nccl_world is there; starts nothing.
[[nodiscard]] std::string_view why_nccl_is_not_built() noexcept;

}  // namespace isoshard
