// SPDX-License-Identifier: Apache-2.0
/// Names of backends.
#include "core/comm/backend.h"

#include <fmt/format.h>

#include <array>

#include "core/base/error.h"

namespace isoshard {

std::string_view name_of(Backend backend) noexcept {
  switch (backend) {
    case Backend::kShm:
      return "shm";
    case Backend::kThread:
      return "thread";
    case Backend::kMpi:
      return "mpi";
    case Backend::kNccl:
      return "nccl";
  }
  return "unknown";
}

Backend parse_backend(std::string_view name) {
  for (const Backend backend :
       std::array{Backend::kShm, Backend::kThread, Backend::kMpi, Backend::kNccl}) {
    if (name == name_of(backend)) return backend;
  }
  throw UsageError(
      fmt::format("unknown backend '{}'; it must be one of shm, thread, mpi, nccl", name));
}

}  // namespace isoshard
