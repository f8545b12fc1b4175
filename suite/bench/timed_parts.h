// SPDX-License-Identifier: Apache-2.0
/// Tells a clock where a training step is: its seams between forward and backward are wrapped.
#pragma once
#include "subjects/train/trainer.h"
#include "suite/clock/step_clock.h"

namespace isoshard {

/// Wraps the data parallelism and, in a pipeline, the runner of the stages. What lies between
/// before_forward and before_backward is forward, until after_backward it is backward; in a
/// pipeline, what the runner asks for.
/// Requires   the clock outlives the parts.
void time_parts(TrainerParts& parts, StepClock& clock);

}  // namespace isoshard
