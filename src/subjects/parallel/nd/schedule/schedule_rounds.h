// SPDX-License-Identifier: Apache-2.0
/// Rounds of micro-batches, in which the stages of a rank take turns.
#pragma once
#include <algorithm>

#include "subjects/parallel/nd/schedule/pipeline_schedule.h"

namespace isoshard {

/// Source   torch 2.11, ScheduleInterleaved1F1B.__init__ ("flex_pp").
[[nodiscard]] inline int num_rounds(const PipelineSpec& spec) {
  return std::max(1, spec.micro_batches / spec.pp);
}

/// pp, where pp divides the micro-batches.
[[nodiscard]] inline int micro_batches_per_round(const PipelineSpec& spec) {
  return spec.micro_batches / num_rounds(spec);
}

/// Forwards that the last rank of a loop makes before its first backward.
/// Source   torch 2.11, _get_warmup_ops; with whole rounds of pp it is Megatron-Core's
///          (num_model_chunks - 1) * pipeline_parallel_size.
[[nodiscard]] inline int warm_up_of_last_rank(const PipelineSpec& spec) {
  return (spec.stages_per_rank - 1) * micro_batches_per_round(spec);
}

}  // namespace isoshard
