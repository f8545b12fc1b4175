// SPDX-License-Identifier: Apache-2.0
/// Stands in for the MPI backend in a build that has none.
#include "core/base/error.h"
#include "core/comm/backend.h"

namespace isoshard {

std::unique_ptr<Communicator> attach_mpi_world() {
  throw NotBuiltError(
      "backend mpi is not part of this build; use shm, which needs nothing installed");
}

}  // namespace isoshard
