// SPDX-License-Identifier: Apache-2.0
/// Interleaved 1F1B for stages that lie on a V.
#pragma once
#include "subjects/parallel/nd/schedule/pipeline_schedule.h"

namespace isoshard {

/// Each rank, as soon as it is free, takes a backward that is ready (the lowest micro-batch, then
/// the latest stage), else a forward that is ready (the latest stage, its next micro-batch) if its
/// memory bound allows. Time is counted with a backward as long as two forwards.
///
/// The bound leaves room for every later stage of the rank, so that a forward is never kept from
/// running by micro-batches that follow it: the lowest unfinished micro-batch always goes on, and
/// no rank waits forever.
///
/// Requires        a spec that require_schedulable() accepts.
/// Determinism     a function of the spec.
[[nodiscard]] PipelineSchedule interleaved_on_a_v(const PipelineSpec& spec);

}  // namespace isoshard
