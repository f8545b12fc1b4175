// SPDX-License-Identifier: Apache-2.0
/// Makes worlds that train start with what a process otherwise finds out at its first step.
#pragma once
#include <vector>

#include "fixtures/cases/case.h"

namespace isoshard {

/// Trains the built-in model "small" for a step of one rank's samples in the calling process, in
/// each dtype that the cases compute in.
///
/// At the first use of each op LibTorch looks symbols up, chooses kernels, and for 16-bit floats
/// makes the code of each product's shape. Ranks inherit all that, instead of each doing it again.
/// Does nothing where LibTorch has devices (core/tensor/device.h).
/// Requires   a controller (harness/world/warm_up.h), before it starts worlds.
void warm_up_training(const std::vector<Case>& cases);

}  // namespace isoshard
