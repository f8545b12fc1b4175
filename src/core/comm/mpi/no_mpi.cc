// SPDX-License-Identifier: Apache-2.0
/// Stands in for the MPI backend in a build that has none.
#include <string>

#include "core/base/error.h"
#include "core/comm/attached_job.h"
#include "core/comm/backend.h"

namespace isoshard {

std::unique_ptr<Communicator> attach_mpi_world(const AttachOptions& /*options*/) {
  throw NotBuiltError(std::string(why_mpi_is_not_built()));
}

std::unique_ptr<AttachedJob> attach_mpi_job() {
  throw NotBuiltError(std::string(why_mpi_is_not_built()));
}

std::string_view why_mpi_is_not_built() noexcept {
  return "backend mpi is not part of this build; use shm, which needs nothing installed, or "
         "install "
         "libopenmpi-dev and openmpi-bin and build again";
}

}  // namespace isoshard
