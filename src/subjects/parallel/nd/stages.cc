// SPDX-License-Identifier: Apache-2.0
// Layers by stage.
#include "subjects/parallel/nd/stages.h"

#include <charconv>
#include <string_view>

#include "core/observe/layer_name.h"
#include "subjects/parallel/fsdp/dim_shards.h"
#include "subjects/parallel/nd/schedule/stage_layers.h"

namespace isoshard {

PipelineSpec pipeline_spec(const NdSettings& settings, int pp, int micro_batches) {
  return pipeline_spec(settings.pipeline_schedule, pp, settings.stages_per_rank,
                       settings.stage_placement, micro_batches);
}

std::vector<ModelSection> stages_of(std::int64_t num_layers, int num_stages,
                                    std::span<const std::int64_t> given) {
  std::vector<ModelSection> stages;
  std::int64_t next = 0;
  for (const std::int64_t count : layers_of_stages(num_layers, num_stages, given)) {
    stages.push_back({next, next + count, next == 0, next + count == num_layers});
    next += count;
  }
  return stages;
}

bool reads(const ModelSection& section, const ParameterSpec& spec) {
  const std::string_view block = layer_of(spec.name);
  if (!block.empty()) {
    const std::string_view digits = block.substr(block.rfind('.') + 1);
    std::int64_t layer = -1;
    std::from_chars(digits.data(), digits.data() + digits.size(), layer);
    return section.first_layer <= layer && layer < section.end_layer;
  }
  switch (spec.param_class) {
    case ParamClass::kTied:
      return section.has_embedding || section.has_head;
    case ParamClass::kEmbedding:
    case ParamClass::kPosition:
      return section.has_embedding;
    default:
      return section.has_head;
  }
}

}  // namespace isoshard
