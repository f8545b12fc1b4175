// SPDX-License-Identifier: Apache-2.0
/// What trainers and their compositions share; internal to train.
#pragma once
#include <ATen/core/Tensor.h>

#include <span>

#include "subjects/train/parts.h"

namespace isoshard::detail {

/// The parts that follow from the settings alone.
[[nodiscard]] TrainerParts common_parts(const TrainerConfig& config);

/// The parts that depend on the plan, on how parameters lie over dp, and on who averages over what.
/// `local_groups` is TrainerParts::num_loss_groups.
void finish(TrainerParts& parts, const TrainerConfig& config, Mesh& mesh, int local_groups,
            bool shards_over_dp = false);

/// fp64.
[[nodiscard]] at::Tensor as_tensor(std::span<const double> values);

}  // namespace isoshard::detail
