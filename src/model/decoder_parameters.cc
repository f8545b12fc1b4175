// SPDX-License-Identifier: Apache-2.0
// The parameters of a rotary decoder, in the order of transformers' named_parameters().
#include <fmt/format.h>

#include "model/blocks.h"

namespace isoshard {
namespace {

void add_attention(std::vector<ParameterSpec>& specs, const ModelConfig& config, const std::string& module) {
  const std::int64_t q_features = config.num_heads * config.head_dim, kv_features = config.num_kv_heads * config.head_dim;
  const auto project = [&](const char* name, std::int64_t out) {
    specs.push_back({module + name + ".weight", {out, config.hidden_size}, ParamClass::kMatrix, ParamInit::kNormal});
    if (config.qkv_bias) specs.push_back({module + name + ".bias", {out}, ParamClass::kBias, ParamInit::kZeros});
  };
  project(".q_proj", q_features);
  project(".k_proj", kv_features);
  project(".v_proj", kv_features);
  specs.push_back({module + ".o_proj.weight", {config.hidden_size, q_features}, ParamClass::kMatrix, ParamInit::kNormal});
}

void add_mlp(std::vector<ParameterSpec>& specs, const ModelConfig& config, const std::string& module) {
  const Shape in_out{config.intermediate_size, config.hidden_size}, out_in{config.hidden_size, config.intermediate_size};
  specs.push_back({module + ".gate_proj.weight", in_out, ParamClass::kMatrix, ParamInit::kNormal});
  specs.push_back({module + ".up_proj.weight", in_out, ParamClass::kMatrix, ParamInit::kNormal});
  specs.push_back({module + ".down_proj.weight", out_in, ParamClass::kMatrix, ParamInit::kNormal});
}

void add_norm(std::vector<ParameterSpec>& specs, const ModelConfig& config, const std::string& module) {
  specs.push_back({module + ".weight", {config.hidden_size}, ParamClass::kNorm, ParamInit::kOnes});
}

}  // namespace

std::vector<ParameterSpec> rotary_decoder_parameters(const ModelConfig& config) {
  std::vector<ParameterSpec> specs;
  const Shape vocabulary{config.vocab_size, config.hidden_size};
  const ParamClass embedding_class = config.tie_word_embeddings ? ParamClass::kTied : ParamClass::kEmbedding;
  specs.push_back({"model.embed_tokens.weight", vocabulary, embedding_class, ParamInit::kNormal});
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string module = fmt::format("model.layers.{}", layer);
    add_attention(specs, config, module + ".self_attn");
    add_mlp(specs, config, module + ".mlp");
    add_norm(specs, config, module + ".input_layernorm");
    add_norm(specs, config, module + ".post_attention_layernorm");
  }
  add_norm(specs, config, "model.norm");
  if (!config.tie_word_embeddings) specs.push_back({"lm_head.weight", vocabulary, ParamClass::kMatrix, ParamInit::kNormal});
  return specs;
}

}  // namespace isoshard
