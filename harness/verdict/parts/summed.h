// SPDX-License-Identifier: Apache-2.0
/// Tensors of which ranks hold summands, put together.
#pragma once
#include <vector>

#include "core/base/host_tensor.h"
#include "harness/trace/reference.h"
#include "harness/verdict/parts/held.h"

namespace isoshard::detail {

/// What the ranks' summands add up to, in units of the reference's tensor.
struct Summed {
  HostTensor whole;
  /// Of summands of a module's output (sum_of): the Frobenius norm of what the order and the
  /// roundings of the sum, and of adding the bias, may make of it. 0 for other tensors, whose
  /// responses show it.
  double order_error = 0;
};

/// Puts the tensor together (Trace::assemble). Summands of a module's output are sums without its
/// bias, which is added as the reference has it.
///
/// Errors   as Trace::assemble; VacuousError if the reference does not say what is added.
[[nodiscard]] Summed summed(const Reference& reference, const Record& wanted, const Trace& actual,
                            const std::vector<Held>& held);

/// Whether the reference says what the summands of a module's output add up to.
[[nodiscard]] bool has_known_sum(const Reference& reference, const RecordKey& summand);

}  // namespace isoshard::detail
