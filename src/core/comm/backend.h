// SPDX-License-Identifier: Apache-2.0
/// The backends by name, and the factories of those that a build may lack.
#pragma once
#include <cstdint>
#include <memory>
#include <string_view>

#include "core/comm/communicator.h"

namespace isoshard {

enum class Backend : std::uint8_t { kShm, kThread, kMpi, kNccl };

/// shm, thread, mpi, nccl.
[[nodiscard]] std::string_view name_of(Backend backend) noexcept;

/// Errors   UsageError that lists the names.
[[nodiscard]] Backend parse_backend(std::string_view name);

/// The communicator of the world that mpirun or srun started (library isoshard::comm_mpi).
/// Errors   NotBuiltError in a build without MPI.
[[nodiscard]] std::unique_ptr<Communicator> attach_mpi_world();

/// A communicator on GPU buffers over NCCL (library isoshard::comm_nccl).
/// Errors   NotBuiltError in a build without CUDA and NCCL.
[[nodiscard]] std::unique_ptr<Communicator> attach_nccl_world();

}  // namespace isoshard
