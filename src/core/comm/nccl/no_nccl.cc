// SPDX-License-Identifier: Apache-2.0
/// Stands in for the NCCL backend in a build that has none.
#include "core/base/error.h"
#include "core/comm/backend.h"

namespace isoshard {

std::unique_ptr<Communicator> attach_nccl_world() {
  throw NotBuiltError("backend nccl is not part of this build; use shm, which needs no GPU");
}

}  // namespace isoshard
