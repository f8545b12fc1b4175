// SPDX-License-Identifier: Apache-2.0
// Llama 2 and 3: a rotary decoder, with biases in attention or mlp by configuration.
#include <nlohmann/json.hpp>

#include "subjects/model/config/config_parts.h"
#include "subjects/model/zoo/blocks.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

ModelConfig parse_llama(const ConfigFields& fields) {
  ModelConfig config = parse_rotary_decoder(fields);
  config.qkv_bias = config.attention_out_bias = fields.boolean("attention_bias", false);
  config.mlp_bias = fields.boolean("mlp_bias", false);
  return config;
}

nlohmann::json write_llama(const ModelConfig& config) {
  nlohmann::json json = rotary_decoder_to_json(config);
  json["architectures"] = {"LlamaForCausalLM"};
  json["attention_bias"] = config.qkv_bias;
  json["mlp_bias"] = config.mlp_bias;
  return json;
}

}  // namespace

Architecture llama_architecture() {
  return {"llama", parse_llama, write_llama, make_rotary_decoder, {.attention = true}};
}

}  // namespace isoshard
