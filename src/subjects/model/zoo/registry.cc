// SPDX-License-Identifier: Apache-2.0
// The list of architectures, and the choice of one by model_type.
#include "subjects/model/zoo/registry.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/base/error.h"
#include "core/base/suggest.h"

namespace isoshard {

std::span<const Architecture> architectures() {
  static const std::array kAll{qwen2_architecture(),  qwen3_architecture(),
                               llama_architecture(),  mistral_architecture(),
                               gpt2_architecture(),   megatron_gpt_architecture(),
                               lattice_architecture()};
  return kAll;
}

const Architecture* find_architecture(std::string_view model_type) {
  const std::span<const Architecture> all = architectures();
  const auto found = std::ranges::find(all, model_type, &Architecture::model_type);
  return found == all.end() ? nullptr : &*found;
}

std::string unknown_model_type(std::string_view model_type) {
  const std::vector<std::string> known = model_types();
  return fmt::format("model_type '{}' is unknown{}; it must be one of {}", model_type,
                     did_you_mean(model_type, known), join_names(known));
}

void set_dropout(ModelConfig& config, double rate) {
  const Architecture* architecture = find_architecture(config.model_type);
  if (architecture == nullptr) throw UsageError(unknown_model_type(config.model_type));
  const DropoutSites& sites = architecture->dropout;
  if (rate != 0 && !sites.embedding && !sites.attention && !sites.residual) {
    throw UsageError(
        fmt::format("the dropout rate of {} must be 0, because it has no dropout, got {}",
                    config.model_type, rate));
  }
  if (sites.embedding) config.embedding_dropout = rate;
  if (sites.attention) config.attention_dropout = rate;
  if (sites.residual) config.residual_dropout = rate;
}

std::unique_ptr<Model> make_model(const ModelConfig& config, AttentionImpl attention) {
  const Architecture* architecture = find_architecture(config.model_type);
  if (architecture == nullptr) throw UsageError(unknown_model_type(config.model_type));
  return architecture->make(config, attention);
}

std::vector<std::string> Model::hidden_state_points() const {
  std::vector<std::string> points{"model.embed_tokens"};
  for (std::int64_t layer = 0; layer + 1 < config().num_layers; ++layer)
    points.push_back(fmt::format("model.layers.{}", layer));
  points.emplace_back("model.norm");
  return points;
}

std::vector<std::string> model_types() {
  std::vector<std::string> result;
  for (const Architecture& architecture : architectures())
    result.emplace_back(architecture.model_type);
  return result;
}

}  // namespace isoshard
