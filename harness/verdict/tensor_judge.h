// SPDX-License-Identifier: Apache-2.0
/// Judging one tensor: all its parts on all ranks against the reference.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "harness/verdict/parts/held.h"
#include "harness/verdict/verdict.h"

namespace isoshard::detail {

struct TensorResult {
  TensorComparison comparison;
  std::vector<Finding> findings;
  std::vector<Axis> differing_axes;  ///< axes along which copies differ
  Rule not_judged;                   ///< why this tensor could not be judged; none if it was
  bool hides_step = false;           ///< SetTolerance::hides_step
};

/// `reference_record` is the reference's record of the same key, or what stands for it;
/// `response_of` is the key whose responses count; `before`, of a parameter after a step, what the
/// ranks held before it (null: that is not recorded).
[[nodiscard]] TensorResult judge_tensor(const Reference& reference, const Record& reference_record,
                                        const Trace& actual, const std::vector<Held>& held,
                                        const JudgePolicy& options, const RecordKey& response_of,
                                        const std::vector<Held>* before);

/// "tp", "dp and tp".
[[nodiscard]] std::string join_axes(const std::vector<Axis>& axes);

}  // namespace isoshard::detail
