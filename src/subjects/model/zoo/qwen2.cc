// SPDX-License-Identifier: Apache-2.0
// Qwen2 and Qwen2.5: a rotary decoder with biases on q, k and v.
#include <nlohmann/json.hpp>

#include "subjects/model/config/config_parts.h"
#include "subjects/model/zoo/blocks.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

ModelConfig parse_qwen2(const ConfigFields& fields) {
  ModelConfig config = parse_rotary_decoder(fields);
  config.qkv_bias = true;
  return config;
}

nlohmann::json write_qwen2(const ModelConfig& config) {
  nlohmann::json json = rotary_decoder_to_json(config);
  json["architectures"] = {"Qwen2ForCausalLM"};
  return json;
}

}  // namespace

Architecture qwen2_architecture() {
  return {"qwen2", parse_qwen2, write_qwen2, make_rotary_decoder, {.attention = true}};
}

}  // namespace isoshard
