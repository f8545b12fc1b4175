// SPDX-License-Identifier: Apache-2.0
// GPT-2: learned positions, LayerNorm, linear layers stored
// [in, out] (transformers' Conv1D), q, k and v in one of them.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/suggest.h"
#include "subjects/model/config/config_parts.h"
#include "subjects/model/zoo/blocks.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

constexpr std::string_view kTokens = "transformer.wte", kTokensWeight = "transformer.wte.weight";

std::string gpt2_layer(std::int64_t layer) {
  return fmt::format("transformer.h.{}", layer);
}

class Gpt2 final : public Model {
 public:
  Gpt2(const ModelConfig& config, AttentionImpl attention)
      : config_(config), attention_(attention) {}
  [[nodiscard]] const ModelConfig& config() const noexcept override { return config_; }
  [[nodiscard]] std::vector<ParameterSpec> parameters() const override;
  [[nodiscard]] std::vector<std::string> hidden_state_points() const override;
  [[nodiscard]] at::Tensor forward(const at::Tensor& input, const Parameters& parameters,
                                   const Strategy& strategy, Sink* sink,
                                   const TrainingPass& training) const override;

 private:
  [[nodiscard]] at::Tensor embed(const ForwardPass& pass, const at::Tensor& input_ids_BS) const;
  [[nodiscard]] at::Tensor attention(const ForwardPass& pass, const std::string& module,
                                     const at::Tensor& x) const;
  [[nodiscard]] at::Tensor mlp(const ForwardPass& pass, const std::string& module,
                               const at::Tensor& x) const;
  [[nodiscard]] at::Tensor residual(const ForwardPass& pass, const std::string& module,
                                    const std::string& out, const at::Tensor& x,
                                    const char* dropout) const;
  [[nodiscard]] at::Tensor layer(const ForwardPass& pass, const std::string& module,
                                 const at::Tensor& x_BSH) const;

  ModelConfig config_;
  AttentionImpl attention_;
};

std::vector<ParameterSpec> Gpt2::parameters() const {
  const std::int64_t hidden = config_.hidden_size, ffn = config_.intermediate_size,
                     head = config_.head_dim;
  std::vector<ParameterSpec> specs;
  const auto column = [&](const std::string& module, std::int64_t out, std::int64_t unit,
                          const std::vector<std::int64_t>& sections) {
    specs.push_back({module + ".weight",
                     {hidden, out},
                     ParamClass::kMatrix,
                     ParamInit::kNormal,
                     {TpRole::kColumn, 1, unit, sections}});
    specs.push_back({module + ".bias",
                     {out},
                     ParamClass::kBias,
                     ParamInit::kZeros,
                     {TpRole::kColumn, 0, unit, sections}});
  };
  const auto row = [&](const std::string& module, std::int64_t in, std::int64_t unit) {
    specs.push_back({module + ".weight",
                     {in, hidden},
                     ParamClass::kMatrix,
                     ParamInit::kNormal,
                     {TpRole::kRow, 0, unit}});
    specs.push_back({module + ".bias", {hidden}, ParamClass::kRowBias, ParamInit::kZeros});
  };

  const ParamClass token_class =
      config_.tie_word_embeddings ? ParamClass::kTied : ParamClass::kEmbedding;
  const TpSplit vocabulary_rows{TpRole::kVocab, 0};
  specs.push_back({std::string(kTokensWeight),
                   {config_.vocab_size, hidden},
                   token_class,
                   ParamInit::kNormal,
                   vocabulary_rows});
  specs.push_back({"transformer.wpe.weight",
                   {config_.max_positions, hidden},
                   ParamClass::kPosition,
                   ParamInit::kNormal});
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
    const std::string module = gpt2_layer(layer);
    add_layer_norm(specs, module + ".ln_1", hidden);
    column(module + ".attn.c_attn", 3 * hidden, head, {hidden, hidden, hidden});
    row(module + ".attn.c_proj", hidden, head);
    add_layer_norm(specs, module + ".ln_2", hidden);
    column(module + ".mlp.c_fc", ffn, 1, {});
    row(module + ".mlp.c_proj", ffn, 1);
  }
  add_layer_norm(specs, "transformer.ln_f", hidden);
  if (!config_.tie_word_embeddings) {
    specs.push_back({"lm_head.weight",
                     {config_.vocab_size, hidden},
                     ParamClass::kMatrix,
                     ParamInit::kNormal,
                     vocabulary_rows});
  }
  return specs;
}

std::vector<std::string> Gpt2::hidden_state_points() const {
  std::vector<std::string> points{"transformer.drop"};
  for (std::int64_t layer = 0; layer + 1 < config_.num_layers; ++layer)
    points.push_back(gpt2_layer(layer));
  points.emplace_back("transformer.ln_f");
  return points;
}

at::Tensor Gpt2::embed(const ForwardPass& pass, const at::Tensor& input_ids_BS) const {
  at::Tensor tokens_BSH =
      pass.strategy().embedding(kTokens, input_ids_BS, pass.parameter(kTokensWeight), pass.sink());
  tokens_BSH = pass.tapped(kTokens, std::move(tokens_BSH), pass.tp_dim_of(kTokens, 2));
  const at::Tensor ids_1S = position_ids(pass, input_ids_BS);
  // Not tapped: it has no batch dim, so no activation layout fits it.
  const at::Tensor positions_1SH = pass.strategy().embedding(
      "transformer.wpe", ids_1S, pass.parameter("transformer.wpe.weight"), pass.sink());
  return pass.tapped(
      "transformer.drop",
      pass.dropout("transformer.drop", tokens_BSH + positions_1SH, config_.embedding_dropout));
}

at::Tensor Gpt2::attention(const ForwardPass& pass, const std::string& module,
                           const at::Tensor& x) const {
  const std::string fused = module + ".c_attn", out = module + ".c_proj";
  const std::vector<at::Tensor> parts = pass.conv1d(fused, x).chunk(3, -1);
  const auto heads = [&](std::size_t part, const char* name) {  // [B,heads,S,D]
    const std::string point = fused + name;
    return split_heads(fused, pass.tapped(point, parts[part], pass.tp_dim_of(fused, 2)),
                       config_.head_dim)
        .transpose(1, 2);
  };
  const at::Tensor q_BNSD = heads(0, ".q"), k_BNSD = heads(1, ".k"), v_BNSD = heads(2, ".v");
  const AttentionDropout dropout =
      pass.attention_dropout(module + ".attn_dropout", fused, config_.attention_dropout);
  const at::Tensor core_BSN =
      pass.tapped(module + ".core",
                  pass.strategy().attention(module, q_BNSD, k_BNSD, v_BNSD, attention_,
                                            SoftmaxDtype::kModel, dropout),
                  pass.tp_dim_of(fused, 2));
  return residual(pass, module, out, core_BSN, ".resid_dropout");
}

at::Tensor Gpt2::mlp(const ForwardPass& pass, const std::string& module,
                     const at::Tensor& x) const {
  const std::string in = module + ".c_fc", out = module + ".c_proj";
  const at::Tensor wide = pass.tapped(in, pass.conv1d(in, x), pass.tp_dim_of(in, 2));
  const at::Tensor act = pass.tapped(module + ".act", gelu_new(wide), pass.tp_dim_of(in, 2));
  return residual(pass, module, out, act, ".dropout");
}

// The output projection and the dropout that end a block.
at::Tensor Gpt2::residual(const ForwardPass& pass, const std::string& module,
                          const std::string& out, const at::Tensor& x, const char* dropout) const {
  const int tp_dim = pass.tp_dim_of(out, 2);
  const at::Tensor projected_BSH = pass.tapped(out, pass.conv1d(out, x), tp_dim);
  return pass.tapped(
      module, pass.dropout(module + dropout, projected_BSH, config_.residual_dropout, tp_dim),
      tp_dim);
}

at::Tensor Gpt2::layer(const ForwardPass& pass, const std::string& module,
                       const at::Tensor& x_BSH) const {
  pass.strategy().enter_block(module);
  const at::Tensor middle_BSH =
      attention(pass, module + ".attn",
                pass.layer_norm(module + ".ln_1", x_BSH, config_.norm_eps)) +
      x_BSH;
  const at::Tensor mlp_in_BSH = pass.layer_norm(module + ".ln_2", middle_BSH, config_.norm_eps);
  return pass.strategy().leave_block(
      module, pass.tapped(module, middle_BSH + mlp(pass, module + ".mlp", mlp_in_BSH)));
}

at::Tensor Gpt2::forward(const at::Tensor& input, const Parameters& parameters,
                         const Strategy& strategy, Sink* sink, const TrainingPass& training) const {
  const ForwardPass pass(parameters, strategy, sink, training);
  at::Tensor x_BSH = input;
  if (pass.section().has_embedding) {
    check_input_ids(input, config_, strategy);
    x_BSH = embed(pass, input);
  }
  for (std::int64_t number = pass.section().first_layer;
       number < pass.end_layer(config_.num_layers); ++number) {
    x_BSH = pass.layer(number, {x_BSH},
                       [this, number](const ForwardPass& own, std::span<const at::Tensor> inputs) {
                         return layer(own, gpt2_layer(number), inputs[0]);
                       });
  }
  if (!pass.section().has_head) return x_BSH;
  x_BSH = pass.layer_norm("transformer.ln_f", x_BSH, config_.norm_eps);
  return pass.linear("lm_head", x_BSH,
                     config_.tie_word_embeddings ? kTokensWeight : "lm_head.weight");
}

void check_switches(const ConfigFields& fields) {
  for (const char* const field :
       {"scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"}) {
    if (fields.boolean(field, false)) fields.fail(field, "must be false; true is not built");
  }
  if (!fields.boolean("scale_attn_weights", true))
    fields.fail("scale_attn_weights", "must be true; false is not built");
  const std::string activation = fields.text("activation_function");
  if (activation != "gelu_new") {
    const std::vector<std::string> known{"gelu_new"};
    fields.fail("activation_function",
                fmt::format("must be gelu_new, the only activation that is built, got '{}'{}",
                            activation, did_you_mean(activation, known)));
  }
}

ModelConfig parse_gpt2(const ConfigFields& fields) {
  ModelConfig config;
  config.vocab_size = fields.positive_integer("vocab_size");
  config.hidden_size = fields.positive_integer("n_embd");
  config.num_layers = fields.num_layers("n_layer");
  config.num_heads = config.num_kv_heads = fields.positive_integer("n_head");
  config.max_positions = fields.positive_integer("n_positions");
  config.intermediate_size =
      fields.has("n_inner") ? fields.positive_integer("n_inner") : 4 * config.hidden_size;
  if (config.hidden_size % config.num_heads != 0) {
    fields.fail("n_embd", fmt::format("must be divisible by n_head {}, got {}", config.num_heads,
                                      config.hidden_size));
  }
  config.head_dim = config.hidden_size / config.num_heads;
  config.norm_eps = fields.positive_number("layer_norm_epsilon");
  config.initializer_range = fields.non_negative_number("initializer_range");
  config.tie_word_embeddings = fields.boolean("tie_word_embeddings", true);
  config.qkv_bias = config.attention_out_bias = config.mlp_bias = true;
  config.embedding_dropout = dropout_rate(fields, "embd_pdrop");
  config.attention_dropout = dropout_rate(fields, "attn_pdrop");
  config.residual_dropout = dropout_rate(fields, "resid_pdrop");
  check_switches(fields);
  check_dtype_field(fields);
  return config;
}

nlohmann::json write_gpt2(const ModelConfig& config) {
  return {{"model_type", config.model_type},
          {"architectures", {"GPT2LMHeadModel"}},
          {"vocab_size", config.vocab_size},
          {"n_embd", config.hidden_size},
          {"n_layer", config.num_layers},
          {"n_head", config.num_heads},
          {"n_positions", config.max_positions},
          {"n_inner", config.intermediate_size},
          {"layer_norm_epsilon", config.norm_eps},
          {"initializer_range", config.initializer_range},
          {"tie_word_embeddings", config.tie_word_embeddings},
          {"activation_function", "gelu_new"},
          {"resid_pdrop", config.residual_dropout},
          {"embd_pdrop", config.embedding_dropout},
          {"attn_pdrop", config.attention_dropout},
          {"torch_dtype", "float32"}};
}

std::unique_ptr<Model> make_gpt2(const ModelConfig& config, AttentionImpl attention) {
  return std::make_unique<Gpt2>(config, attention);
}

}  // namespace

Architecture gpt2_architecture() {
  return {"gpt2", parse_gpt2, write_gpt2, make_gpt2, kAllDropouts};
}

}  // namespace isoshard
