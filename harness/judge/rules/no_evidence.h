// SPDX-License-Identifier: Apache-2.0
/// What agrees and shows little: tensors that are zero, parameters whose numbers are all equal, and
/// weights that no forward pass read after they were updated.
#pragma once
#include <string>
#include <vector>

#include "harness/trace/reference.h"
#include "harness/verdict/verdict.h"

namespace isoshard::detail {

/// Computed tensors that are zero on both sides, in the order of `tensors`.
[[nodiscard]] std::vector<std::string> zero_tensors(const std::vector<TensorComparison>& tensors);

/// Names of parameters that have one value everywhere, of more than one element, whenever a
/// recorded forward pass reads them: a bias of zeros, a weight of ones. A wrong use of them may
/// change nothing. Empty if the reference has no bytes.
[[nodiscard]] std::vector<std::string> constant_parameters(const Reference& reference);

/// Whether the reference updated a parameter, and a recorded forward pass read it after that. True
/// if it updated none.
[[nodiscard]] bool reads_updated_weights(const Reference& reference);

}  // namespace isoshard::detail
