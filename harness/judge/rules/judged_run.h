// SPDX-License-Identifier: Apache-2.0
/// What a judge knows of a run when it looks for causes, and when rules conclude.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "harness/verdict/parts/held.h"
#include "harness/verdict/tensor_judge.h"
#include "harness/verdict/verdict.h"

namespace isoshard::detail {

struct OrderedFinding {
  std::int64_t order;
  Finding finding;
  std::shared_ptr<const TensorResult> result = nullptr;  ///< of a tensor that was judged
};

/// Refers to what it is made of.
struct JudgedRun {
  const Reference& reference;
  const Trace& actual;
  const std::map<RecordKey, std::vector<Held>>& held;  ///< by ranks
  const std::vector<TensorComparison>& tensors;
  const JudgePolicy& options;
};

}  // namespace isoshard::detail
