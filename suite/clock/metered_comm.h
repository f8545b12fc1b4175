// SPDX-License-Identifier: Apache-2.0
/// A communicator that tells a clock how long each of its calls took, and what it moved.
#pragma once
#include <functional>
#include <memory>

#include "core/comm/communicator.h"
#include "suite/clock/step_clock.h"

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

/// Whether the communicator can say what is on its way: that of a rank in a region of shared memory
/// can. Of others nothing is ever said to be hidden.
[[nodiscard]] bool knows_what_is_under_way(const Communicator& inner) noexcept;

/// The same with what the communicator itself says is on its way.
[[nodiscard]] std::unique_ptr<Communicator> metered(std::unique_ptr<Communicator> inner,
                                                    StepClock& clock);

}  // namespace isoshard
