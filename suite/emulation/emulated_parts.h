// SPDX-License-Identifier: Apache-2.0
/// Which part of a parameter an emulated rank holds and steps, by the declared cuts and runs.
#pragma once
#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include "core/mesh/layout.h"
#include "subjects/model/model.h"
#include "subjects/parallel/tensor_numerics.h"

namespace isoshard {

/// nullptr: every tp rank holds the whole parameter.
[[nodiscard]] const ParameterCut* cut_of(const TensorNumerics& tensor, std::string_view parameter);
[[nodiscard]] const std::vector<Range>& ranges_of(const ParameterCut& cut, int tp_rank);
/// Contiguous: the shape and strides decide which kernel runs. What is not cut is the one whole
/// tensor until a rank writes into it.
[[nodiscard]] at::Tensor part_of(const at::Tensor& whole, const ParameterCut* cut, int tp_rank);
[[nodiscard]] bool is_first_holder(const ParameterCut& cut, int tp_rank);

/// Where a tp rank's part lies.
[[nodiscard]] Layout layout_of_part(const TensorNumerics& tensor, const ParameterSpec& spec,
                                    int tp_rank);
/// Where runs of a tp rank's flattened part lie, one behind the other; `part` is that part's shape.
/// Shares no code with src/subjects/parallel.
[[nodiscard]] Layout layout_of_runs(const TensorNumerics& tensor, const ParameterSpec& spec,
                                    int tp_rank, const Shape& part, const std::vector<Range>& runs);

}  // namespace isoshard
