// SPDX-License-Identifier: Apache-2.0
/// What one tensor of a run may differ from the reference by.
#pragma once
#include <string>

#include "harness/trace/judge_policy.h"
#include "harness/trace/reference.h"
#include "harness/verdict/verdict.h"

namespace isoshard::detail {

/// What the tolerance of a comparison is made of. Refers to all of it.
struct ToleranceInputs {
  const Reference& reference;
  const Record& wanted;          ///< the reference's, or what stands for it (wanted_of)
  const RecordKey& response_of;  ///< whose responses count
  const JudgePolicy& options;
  const Record& held;      ///< of the first rank that has the tensor
  bool is_masked = false;  ///< some rank left out steps of small gradients
  /// Of summands that were added up: what the order of the sum may make of it (Summed).
  double order_error = 0;
  /// Of a parameter after a step: the Frobenius norm of the run's error before it. Infinite: it is
  /// not known.
  double error_before = 0;
};

struct SetTolerance {
  Rule not_judged = {};  ///< why nothing can be said of the tensor; none if it is set
  /// In 16 bits, of a parameter or a master that moved: what is legal is as large as the step, so
  /// that a run which left the step out would pass.
  bool hides_step = false;
};

/// Sets level, allowed errors and sensitivity of `c` by its statistics, and what a rolled copy
/// would get.
[[nodiscard]] SetTolerance set_tolerance(TensorComparison& c, const ToleranceInputs& in);

/// Whether `stats` use no more than `share` of what the whole tensor is allowed. Every comparison
/// is written so that a NaN fails it.
[[nodiscard]] bool within_tolerance(const TensorComparison& c, const Stats& stats,
                                    double share) noexcept;

}  // namespace isoshard::detail
