// SPDX-License-Identifier: Apache-2.0
/// A communicator that tells a clock how long each of its calls took, and what it moved.
#pragma once
#include <functional>
#include <memory>

#include "core/comm/communicator.h"
#include "suite/bench/step_clock.h"

namespace isoshard {

/// Whether a transfer of the rank is on its way after its last call.
using UnderWay = std::function<bool()>;

/// Groups that are split from it tell the same clock.
/// Requires   the clock outlives it; its calls are made by one thread.
[[nodiscard]] std::unique_ptr<Communicator> metered(std::unique_ptr<Communicator> inner,
                                                    StepClock& clock, UnderWay under_way);

/// The same of a communicator that outlives it.
[[nodiscard]] std::unique_ptr<Communicator> metered(Communicator& inner, StepClock& clock,
                                                    UnderWay under_way);

/// The same of a rank in a region of shared memory, which knows what is on its way.
/// Errors   InfrastructureError for any other communicator.
[[nodiscard]] std::unique_ptr<Communicator> metered_region(std::unique_ptr<Communicator> inner,
                                                           StepClock& clock);

}  // namespace isoshard
