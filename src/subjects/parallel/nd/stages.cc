// SPDX-License-Identifier: Apache-2.0
// Layers by stage.
#include "subjects/parallel/nd/stages.h"

#include <fmt/format.h>

#include <charconv>
#include <string_view>

#include "core/base/error.h"
#include "subjects/parallel/fsdp/dim_shards.h"

namespace isoshard {

std::vector<ModelSection> stages_of(std::int64_t num_layers, int num_stages) {
  if (num_stages < 1 || num_layers < num_stages) {
    throw UsageError(
        fmt::format("the number of stages must be from 1 to the {} layers of the model, got {}",
                    num_layers, num_stages));
  }
  std::vector<ModelSection> stages;
  std::int64_t next = 0;
  for (int stage = 0; stage < num_stages; ++stage) {
    const std::int64_t count = num_layers / num_stages + (stage < num_layers % num_stages ? 1 : 0);
    stages.push_back({next, next + count, stage == 0, stage + 1 == num_stages});
    next += count;
  }
  return stages;
}

bool reads(const ModelSection& section, const ParameterSpec& spec) {
  const std::string_view block = block_of(spec.name);
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
