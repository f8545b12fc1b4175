// SPDX-License-Identifier: Apache-2.0
/// Names of backends.
#include "core/comm/backend.h"

#include <fmt/format.h>

#include <array>
#include <string>
#include <vector>

#include "core/base/error.h"
#include "core/base/suggest.h"

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
  std::vector<std::string> known;
  for (const Backend backend :
       std::array{Backend::kShm, Backend::kThread, Backend::kMpi, Backend::kNccl}) {
    if (name == name_of(backend)) return backend;
    known.emplace_back(name_of(backend));
  }
  throw UsageError(fmt::format("unknown backend '{}'{}; it must be one of {}", name,
                               did_you_mean(name, known), join_names(known)));
}

}  // namespace isoshard
