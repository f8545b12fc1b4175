// SPDX-License-Identifier: Apache-2.0
/// What the environment says about who started this process: whether MPI would make the world that
/// the user meant.
#pragma once
#include <functional>

namespace isoshard {

/// The value of an environment variable, null if it is not set: std::getenv, or a test's.
using Environment = std::function<const char*(const char*)>;

/// Called before MPI starts.
/// Errors   UsageError where neither mpirun nor srun with PMIx or PMI started this process. It
/// names
///          torchrun's variables, or SLURM_NTASKS, where they promise a world that MPI would split
///          into worlds of one rank each.
void check_launcher(const Environment& environment);

/// Called with the world that MPI made. `expected_size` is 0 if any will do.
/// Errors   UsageError where mpirun's, torchrun's or Slurm's variables say another rank or size, or
/// where the
///          world has another size than expected.
void check_attached_world(const Environment& environment, int rank, int size, int expected_size);

}  // namespace isoshard
