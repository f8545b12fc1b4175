// SPDX-License-Identifier: Apache-2.0
// Mistral: a rotary decoder without biases, whose head size need not be hidden / heads.
#include <nlohmann/json.hpp>

#include "subjects/model/config/config_parts.h"
#include "subjects/model/zoo/blocks.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

nlohmann::json write_mistral(const ModelConfig& config) {
  nlohmann::json json = rotary_decoder_to_json(config);
  json["architectures"] = {"MistralForCausalLM"};
  json["sliding_window"] = nullptr;
  json.erase("use_sliding_window");  // Mistral's window has no switch: it is used if it has a size
  return json;
}

}  // namespace

Architecture mistral_architecture() {
  return {"mistral", parse_rotary_decoder, write_mistral, make_rotary_decoder, {.attention = true}};
}

}  // namespace isoshard
