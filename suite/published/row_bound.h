// SPDX-License-Identifier: Apache-2.0
/// The largest difference between a row-parallel product and the unsharded product, derived in
/// docs/internals/tolerances.md.
#pragma once
#include <ATen/core/Tensor.h>

#include "core/base/dtype.h"
#include "core/comm/communicator.h"

namespace isoshard {

/// An upper bound of abs(row-parallel - whole) for each element of x W^T.
///
/// Shapes   x [M,K], weight [N,K], both as the layers see them; returns fp64 [M,N].
/// Errors   UsageError if tp does not divide K, or for a dtype that is not floating-point or the
///          order native.
/// Source   docs/internals/tolerances.md, "Row-parallel products".
[[nodiscard]] at::Tensor row_parallel_bound(const at::Tensor& x_MK, const at::Tensor& weight_NK,
                                            int tp, Dtype dtype, ReductionOrder order);

/// The largest abs(actual - reference) / bound: at most 1 if the bound holds. NaN and a difference
/// where the bound is 0 give infinity.
[[nodiscard]] double share_of_bound(const at::Tensor& reference, const at::Tensor& actual,
                                    const at::Tensor& bound);

}  // namespace isoshard
