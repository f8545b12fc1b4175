// SPDX-License-Identifier: Apache-2.0
/// Reductions of a declared arithmetic, written out.
#pragma once
#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "subjects/parallel/reduction_point.h"

namespace isoshard {

/// What every rank of a group gets, in a new contiguous tensor of the parts' dtype. `parts` are in
/// the order of the group's ranks.
///
/// Errors   ShapeError if shapes or dtypes differ, or for a dtype that is no float and not int64;
///          UsageError if the point names addends that are not the group's ranks, each once, or an
///          order that is not written out here.
/// Determinism   plain loops; the compiler may neither reorder nor contract them.
/// Source   docs/internals/reduction.md. Shares no code with src/core/comm: it is what
/// src/core/comm is held
///          to.
[[nodiscard]] at::Tensor emulated_reduction(std::span<const at::Tensor> parts,
                                            const ReductionPoint& point);

/// The project's dtype as ATen's.   Errors   ShapeError unless it is a float.
[[nodiscard]] at::ScalarType float_type_of(Dtype dtype);

/// A vector of numbers that ranks add.
[[nodiscard]] at::Tensor fp64_tensor(const std::vector<double>& values);

}  // namespace isoshard
