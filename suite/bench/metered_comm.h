// SPDX-License-Identifier: Apache-2.0
/// A communicator that tells a clock how long each of its calls took, and what it moved.
#pragma once
#include <memory>

#include "core/comm/communicator.h"
#include "suite/bench/step_clock.h"

namespace isoshard {

/// Groups that are split from it tell the same clock.
/// Requires   the clock outlives it; its calls are made by one thread.
[[nodiscard]] std::unique_ptr<Communicator> metered(std::unique_ptr<Communicator> inner,
                                                    StepClock& clock);

}  // namespace isoshard
