// SPDX-License-Identifier: Apache-2.0
/// What optimizer.cc and the files of the single update rules share.
#pragma once
#include <memory>

#include "subjects/optim/optimizer.h"

namespace isoshard::detail {

[[nodiscard]] std::unique_ptr<Optimizer> make_sgd(const OptimizerSettings& settings);
[[nodiscard]] std::unique_ptr<Optimizer> make_adamw(const OptimizerSettings& settings);

/// The gradient of `name`, which may be undefined.
/// Errors   ShapeError if the names of the two maps differ, or a gradient's shape is not its
///          parameter's.
[[nodiscard]] const at::Tensor& gradient_of(const std::string& name, const at::Tensor& parameter,
                                            const NamedTensors& gradients);
/// Errors   ShapeError if `gradients` has names that `parameters` lacks.
void check_same_names(const NamedTensors& parameters, const NamedTensors& gradients);

}  // namespace isoshard::detail
