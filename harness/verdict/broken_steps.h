// SPDX-License-Identifier: Apache-2.0
/// Elements that a mask leaves out of the comparison, and that break what is demanded of them
/// (harness/trace/masked_steps.h).
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "harness/verdict/tensor_judge.h"

namespace isoshard::detail {

struct BrokenSteps {
  std::int64_t count = 0;  ///< over all ranks
  std::vector<int> ranks;
  FindingId problem = FindingId::kNone;
  NamedValues measured;
  bool of_rows = false;    ///< the first is an element of a row that did not make its step
  bool confirmed = false;  ///< the controller counted the same in the first rank's kept bytes
};

/// What ranks found of one tensor; none if every element is as demanded.
[[nodiscard]] std::optional<BrokenSteps> broken_steps(const Reference& reference,
                                                      const Record& wanted,
                                                      const std::vector<Held>& held,
                                                      const JudgePolicy& policy);

}  // namespace isoshard::detail
