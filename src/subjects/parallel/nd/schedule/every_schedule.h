// SPDX-License-Identifier: Apache-2.0
/// The specs over which properties of schedules are tested.
#pragma once
#include <fmt/format.h>

#include <string>
#include <vector>

#include "core/base/error.h"
#include "subjects/parallel/nd/schedule/pipeline_schedule.h"

namespace isoshard {

/// "1F1B_pp2_v1_m4", for messages.
[[nodiscard]] inline std::string slug(const PipelineSpec& spec) {
  return fmt::format("{}{}_pp{}_v{}_m{}", to_string(spec.kind),
                     spec.placement == default_placement(spec.kind) ? "" : "_other", spec.pp,
                     spec.stages_per_rank, spec.micro_batches);
}

[[nodiscard]] inline bool is_schedulable(const PipelineSpec& spec) {
  try {
    require_schedulable(spec);
    return true;
  } catch (const UsageError&) {
    return false;
  }
}

/// Every kind on every placement with pp 1..8, 1..3 stages a rank and 1..16 micro-batches that
/// require_schedulable() takes.
[[nodiscard]] inline std::vector<PipelineSpec> every_spec() {
  std::vector<PipelineSpec> specs;
  for (const PipelineKind kind :
       {PipelineKind::kGPipe, PipelineKind::k1F1B, PipelineKind::kInterleaved1F1B,
        PipelineKind::kInterleavedZeroBubble, PipelineKind::kZbvZeroBubble})
    for (const StagePlacement placement : {StagePlacement::kLoop, StagePlacement::kV})
      for (int pp = 1; pp <= 8; ++pp)
        for (int stages_per_rank = 1; stages_per_rank <= 3; ++stages_per_rank)
          for (int micro_batches = 1; micro_batches <= 16; ++micro_batches) {
            const PipelineSpec spec{kind, pp, stages_per_rank, placement, micro_batches};
            if (is_schedulable(spec)) specs.push_back(spec);
          }
  return specs;
}

}  // namespace isoshard
