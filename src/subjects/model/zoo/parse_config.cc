// SPDX-License-Identifier: Apache-2.0
// config.json to ModelConfig and back; what is common to all architectures.
#include "subjects/model/config/config.h"

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/suggest.h"
#include "subjects/model/config/config_fields.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {

std::string_view name_of(AttentionImpl impl) noexcept {
  switch (impl) {
    case AttentionImpl::kEager:
      return "eager";
    case AttentionImpl::kSdpa:
      return "sdpa";
  }
  return "unknown";
}

AttentionImpl parse_attention_impl(std::string_view name) {
  const std::vector<std::string> known{"eager", "sdpa"};
  if (name == known[0]) return AttentionImpl::kEager;
  if (name == known[1]) return AttentionImpl::kSdpa;
  if (name == "flash_attention_2") {
    throw UsageError(
        "attention implementation 'flash_attention_2' has no CPU kernel; use sdpa or eager");
  }
  throw UsageError(fmt::format("unknown attention implementation '{}'{}; it must be one of {}",
                               name, did_you_mean(name, known), join_names(known)));
}

ModelConfig parse_model_config(const nlohmann::json& json, std::string_view origin) {
  const ConfigFields fields(json, origin);
  const std::string model_type = fields.text("model_type");
  const Architecture* architecture = find_architecture(model_type);
  if (architecture == nullptr)
    throw FileError(fmt::format("{}: {}", origin, unknown_model_type(model_type)));
  if (fields.has("quantization_config"))
    fields.fail("quantization_config", "must not be set, because quantized models are not built");
  ModelConfig config = architecture->parse(fields);
  config.model_type = model_type;
  return config;
}

nlohmann::json to_json(const ModelConfig& config) {
  const Architecture* architecture = find_architecture(config.model_type);
  if (architecture == nullptr) throw UsageError(unknown_model_type(config.model_type));
  return architecture->to_json(config);
}

}  // namespace isoshard
