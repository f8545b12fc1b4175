// SPDX-License-Identifier: Apache-2.0
// The parameters of a rotary decoder, in the order of transformers' named_parameters().
#include <fmt/format.h>

#include "subjects/model/zoo/blocks.h"

namespace isoshard {
namespace {

const TpSplit kVocabRows{TpRole::kVocab, 0};

/// Adds the parameters of linear layers [out, in].
class LinearSpecs {
 public:
  explicit LinearSpecs(std::vector<ParameterSpec>& specs) : specs_(&specs) {}

  void column(const std::string& module, std::int64_t out, std::int64_t in, bool has_bias,
              std::int64_t unit = 1, bool is_kv = false) const {
    const TpSplit rows{TpRole::kColumn, 0, unit, {}, is_kv};
    specs_->push_back(
        {module + ".weight", {out, in}, ParamClass::kMatrix, ParamInit::kNormal, rows});
    if (has_bias)
      specs_->push_back({module + ".bias", {out}, ParamClass::kBias, ParamInit::kZeros, rows});
  }
  void row(const std::string& module, std::int64_t out, std::int64_t in, bool has_bias,
           std::int64_t unit = 1) const {
    specs_->push_back({module + ".weight",
                       {out, in},
                       ParamClass::kMatrix,
                       ParamInit::kNormal,
                       {TpRole::kRow, 1, unit}});
    if (has_bias)
      specs_->push_back({module + ".bias", {out}, ParamClass::kRowBias, ParamInit::kZeros});
  }
  void norm(const std::string& module, std::int64_t size, ParamClass param_class) const {
    specs_->push_back({module + ".weight", {size}, param_class, ParamInit::kOnes});
  }

 private:
  std::vector<ParameterSpec>* specs_;
};

void add_attention(const LinearSpecs& add, const ModelConfig& config, const std::string& module) {
  const std::int64_t head = config.head_dim, q_features = config.num_heads * head,
                     kv_features = config.num_kv_heads * head;
  add.column(module + ".q_proj", q_features, config.hidden_size, config.qkv_bias, head);
  add.column(module + ".k_proj", kv_features, config.hidden_size, config.qkv_bias, head,
             /*is_kv=*/true);
  add.column(module + ".v_proj", kv_features, config.hidden_size, config.qkv_bias, head,
             /*is_kv=*/true);
  add.row(module + ".o_proj", config.hidden_size, q_features, config.attention_out_bias, head);
  if (!config.qk_norm) return;
  add.norm(module + ".q_norm", head, ParamClass::kQkNorm);
  add.norm(module + ".k_norm", head, ParamClass::kQkNorm);
}

void add_mlp(const LinearSpecs& add, const ModelConfig& config, const std::string& module) {
  add.column(module + ".gate_proj", config.intermediate_size, config.hidden_size, config.mlp_bias);
  add.column(module + ".up_proj", config.intermediate_size, config.hidden_size, config.mlp_bias);
  add.row(module + ".down_proj", config.hidden_size, config.intermediate_size, config.mlp_bias);
}

}  // namespace

void add_layer_norm(std::vector<ParameterSpec>& specs, const std::string& module,
                    std::int64_t size) {
  specs.push_back({module + ".weight", {size}, ParamClass::kNorm, ParamInit::kOnes});
  specs.push_back({module + ".bias", {size}, ParamClass::kNorm, ParamInit::kZeros});
}

std::vector<ParameterSpec> rotary_decoder_parameters(const ModelConfig& config) {
  std::vector<ParameterSpec> specs;
  const LinearSpecs add(specs);
  const Shape vocabulary{config.vocab_size, config.hidden_size};
  const ParamClass embedding_class =
      config.tie_word_embeddings ? ParamClass::kTied : ParamClass::kEmbedding;
  specs.push_back(
      {"model.embed_tokens.weight", vocabulary, embedding_class, ParamInit::kNormal, kVocabRows});
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::string module = fmt::format("model.layers.{}", layer);
    add_attention(add, config, module + ".self_attn");
    add_mlp(add, config, module + ".mlp");
    add.norm(module + ".input_layernorm", config.hidden_size, ParamClass::kNorm);
    add.norm(module + ".post_attention_layernorm", config.hidden_size, ParamClass::kNorm);
  }
  add.norm("model.norm", config.hidden_size, ParamClass::kNorm);
  if (!config.tie_word_embeddings)
    specs.push_back(
        {"lm_head.weight", vocabulary, ParamClass::kMatrix, ParamInit::kNormal, kVocabRows});
  return specs;
}

}  // namespace isoshard
