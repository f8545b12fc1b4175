// SPDX-License-Identifier: Apache-2.0
/// A tensor for a tensor.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "core/comm/communicator.h"

namespace isoshard {

/// Sends a tensor to one rank of the group and returns what another one sends: a new tensor of the
/// same shape and dtype. One segment, named `name`.
/// Ranks        collective over all that send to each other.
[[nodiscard]] at::Tensor exchanged(const at::Tensor& tensor, int to, int from, Communicator& group,
                                   Purpose purpose, Axis axis, const std::string& name,
                                   ParamClass param_class = ParamClass::kOther);

}  // namespace isoshard
