// SPDX-License-Identifier: Apache-2.0
/// Flags of the loss scale.
#pragma once
#include "harness/cli/options.h"
#include "subjects/optim/loss_scale.h"

namespace isoshard {

void declare_loss_scale_options(OptionTable& table);

/// Errors   UsageError for a --loss-scale that is neither dynamic, none nor a number, and for other
///          flags without a dynamic one.
void apply_loss_scale_options(const ParsedOptions& options, LossScaleSettings& settings);

}  // namespace isoshard
