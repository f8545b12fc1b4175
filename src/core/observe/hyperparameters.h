// SPDX-License-Identifier: Apache-2.0
/// The numbers by which an optimizer steps one parameter, as the record
/// optimizer/PARAMETER.hyperparameters holds them: fp64 of this shape, 0 where the optimizer has no
/// such number.
#pragma once
#include <array>
#include <string_view>

namespace isoshard {

/// Names of the elements, in their order; those of torch.optim's groups of parameters.
inline constexpr std::array<std::string_view, 9> kHyperparameters = {
    "lr", "weight_decay", "eps", "beta1", "beta2", "momentum", "dampening", "nesterov", "maximize"};

}  // namespace isoshard
