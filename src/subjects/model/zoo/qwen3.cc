// SPDX-License-Identifier: Apache-2.0
// Qwen3: a rotary decoder with norms over the heads of q and k and a head dim of its own.
#include <nlohmann/json.hpp>

#include "subjects/model/config/config_parts.h"
#include "subjects/model/zoo/blocks.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

ModelConfig parse_qwen3(const ConfigFields& fields) {
  // transformers fills in 128, not the quotient: a guess could be silently wrong.
  if (!fields.has("head_dim")) fields.fail("head_dim", "is missing; qwen3 needs it");
  ModelConfig config = parse_rotary_decoder(fields);
  config.qk_norm = true;
  config.qkv_bias = config.attention_out_bias = fields.boolean("attention_bias", false);
  return config;
}

nlohmann::json write_qwen3(const ModelConfig& config) {
  nlohmann::json json = rotary_decoder_to_json(config);
  json["architectures"] = {"Qwen3ForCausalLM"};
  json["attention_bias"] = config.qkv_bias;
  return json;
}

}  // namespace

Architecture qwen3_architecture() {
  return {"qwen3", parse_qwen3, write_qwen3, make_rotary_decoder, {.attention = true}};
}

}  // namespace isoshard
