// SPDX-License-Identifier: Apache-2.0
/// Names of levels, and when small gradients are masked.
#include "harness/trace/judge_policy.h"

namespace isoshard {

std::string_view name_of(Level level) noexcept {
  switch (level) {
    case Level::kExact:
      return "exact";
    case Level::kBounded:
      return "bounded";
    case Level::kPerturbed:
      return "perturbed";
    case Level::kReported:
      return "reported";
  }
  return "unknown";
}

bool masks_small_gradients(const JudgePolicy& policy, int response_runs,
                           RunPurpose purpose) noexcept {
  return policy.mask && (purpose == RunPurpose::kResponse || response_runs > 0);
}

}  // namespace isoshard
