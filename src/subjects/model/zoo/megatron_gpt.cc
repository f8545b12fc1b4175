// SPDX-License-Identifier: Apache-2.0
// Megatron-Core's GPTModel: pre-norm layers with LayerNorm, q,
// k and v fused and interleaved by kv group, gelu, learned or rotary positions. There is no
// config.json of it: the fields are those of Megatron's TransformerConfig and command line.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/base/suggest.h"
#include "subjects/model/config/config_parts.h"
#include "subjects/model/zoo/blocks.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

constexpr std::string_view kWords = "embedding.word_embeddings",
                           kWordsWeight = "embedding.word_embeddings.weight";
constexpr std::string_view kPositions = "embedding.position_embeddings",
                           kPositionsWeight = "embedding.position_embeddings.weight";

std::string megatron_gpt_layer(std::int64_t layer) {
  return fmt::format("decoder.layers.{}", layer);
}

class MegatronGpt final : public Model {
 public:
  MegatronGpt(const ModelConfig& config, AttentionImpl attention)
      : config_(config), attention_(attention) {}
  [[nodiscard]] const ModelConfig& config() const noexcept override { return config_; }
  [[nodiscard]] std::vector<ParameterSpec> parameters() const override;
  [[nodiscard]] std::string head_module() const override { return "output_layer"; }
  [[nodiscard]] std::vector<std::string> hidden_state_points() const override;
  [[nodiscard]] at::Tensor forward(const at::Tensor& input, const Parameters& parameters,
                                   const Strategy& strategy, Sink* sink,
                                   const TrainingPass& training) const override;

 private:
  [[nodiscard]] at::Tensor embed(const ForwardPass& pass, const at::Tensor& input_ids_BS) const;
  [[nodiscard]] at::Tensor attention(const ForwardPass& pass, const std::string& module,
                                     const at::Tensor& x_BSH, const RotaryTables& tables) const;
  [[nodiscard]] at::Tensor mlp(const ForwardPass& pass, const std::string& module,
                               const at::Tensor& x_BSH) const;
  [[nodiscard]] at::Tensor layer(const ForwardPass& pass, const std::string& module,
                                 const at::Tensor& x_BSH, const RotaryTables& tables) const;

  ModelConfig config_;
  AttentionImpl attention_;
};

std::vector<ParameterSpec> MegatronGpt::parameters() const {
  const std::int64_t hidden = config_.hidden_size, ffn = config_.intermediate_size,
                     head = config_.head_dim;
  // A kv group: its query heads, its key head, its value head.
  const std::int64_t group = (config_.num_heads / config_.num_kv_heads + 2) * head;
  std::vector<ParameterSpec> specs;
  const auto column = [&](const std::string& module, std::int64_t out, bool has_bias,
                          std::int64_t unit) {
    const TpSplit rows{TpRole::kColumn, 0, unit};
    specs.push_back(
        {module + ".weight", {out, hidden}, ParamClass::kMatrix, ParamInit::kNormal, rows});
    if (has_bias)
      specs.push_back({module + ".bias", {out}, ParamClass::kBias, ParamInit::kZeros, rows});
  };
  const auto row = [&](const std::string& module, std::int64_t in, bool has_bias,
                       std::int64_t unit) {
    specs.push_back({module + ".weight",
                     {hidden, in},
                     ParamClass::kMatrix,
                     ParamInit::kNormal,
                     {TpRole::kRow, 1, unit}});
    if (has_bias)
      specs.push_back({module + ".bias", {hidden}, ParamClass::kRowBias, ParamInit::kZeros});
  };

  const Shape vocabulary{config_.vocab_size, hidden};
  const TpSplit vocabulary_rows{TpRole::kVocab, 0};
  const ParamClass word_class =
      config_.tie_word_embeddings ? ParamClass::kTied : ParamClass::kEmbedding;
  specs.push_back(
      {std::string(kWordsWeight), vocabulary, word_class, ParamInit::kNormal, vocabulary_rows});
  if (config_.learned_positions) {
    specs.push_back({std::string(kPositionsWeight),
                     {config_.max_positions, hidden},
                     ParamClass::kPosition,
                     ParamInit::kNormal});
  }
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
    const std::string module = megatron_gpt_layer(layer);
    add_layer_norm(specs, module + ".input_layernorm", hidden);
    column(module + ".self_attention.linear_qkv", config_.num_kv_heads * group, config_.qkv_bias,
           group);
    row(module + ".self_attention.linear_proj", config_.num_heads * head,
        config_.attention_out_bias, head);
    add_layer_norm(specs, module + ".pre_mlp_layernorm", hidden);
    column(module + ".mlp.linear_fc1", ffn, config_.mlp_bias, 1);
    row(module + ".mlp.linear_fc2", ffn, config_.mlp_bias, 1);
  }
  add_layer_norm(specs, "decoder.final_layernorm", hidden);
  if (!config_.tie_word_embeddings) {
    specs.push_back({"output_layer.weight", vocabulary, ParamClass::kMatrix, ParamInit::kNormal,
                     vocabulary_rows});
  }
  return specs;
}

std::vector<std::string> MegatronGpt::hidden_state_points() const {
  std::vector<std::string> points{"embedding"};
  for (std::int64_t layer = 0; layer + 1 < config_.num_layers; ++layer)
    points.push_back(megatron_gpt_layer(layer));
  points.emplace_back("decoder.final_layernorm");
  return points;
}

at::Tensor MegatronGpt::embed(const ForwardPass& pass, const at::Tensor& input_ids_BS) const {
  at::Tensor x_BSH =
      pass.strategy().embedding(kWords, input_ids_BS, pass.parameter(kWordsWeight), pass.sink());
  x_BSH = pass.tapped(kWords, std::move(x_BSH), pass.tp_dim_of(kWords, 2));
  if (config_.learned_positions) {
    const at::Tensor ids_1S = position_ids(pass, input_ids_BS);
    // Not tapped: it has no batch dim, so no activation layout fits it.
    x_BSH = x_BSH + pass.strategy().embedding(kPositions, ids_1S, pass.parameter(kPositionsWeight),
                                              pass.sink());
  }
  return pass.tapped("embedding",
                     pass.dropout("embedding.embedding_dropout", x_BSH, config_.embedding_dropout));
}

at::Tensor MegatronGpt::attention(const ForwardPass& pass, const std::string& module,
                                  const at::Tensor& x_BSH, const RotaryTables& tables) const {
  const std::string fused = module + ".linear_qkv", out = module + ".linear_proj";
  const std::int64_t head = config_.head_dim,
                     queries = config_.num_heads / config_.num_kv_heads * head;
  std::optional<at::Tensor> bias;
  if (config_.qkv_bias) bias = pass.parameter(fused + ".bias");
  const at::Tensor qkv_BSF =
      pass.strategy().linear(fused, x_BSH, pass.parameter(fused + ".weight"), bias, pass.sink());
  // of each kv group q, k, v
  const at::Tensor groups_BSKG = split_heads(fused, qkv_BSF, queries + 2 * head);
  // [B,heads,S,D]
  const auto heads = [&](const char* name, std::int64_t begin, std::int64_t size) {
    const at::Tensor part_BSF = groups_BSKG.narrow(3, begin, size).flatten(2);
    return split_heads(fused, pass.tapped(fused + name, part_BSF, pass.tp_dim_of(fused, 2)), head)
        .transpose(1, 2);
  };
  at::Tensor q_BNSD = heads(".q", 0, queries), k_BKSD = heads(".k", queries, head);
  const at::Tensor v_BKSD = heads(".v", queries + head, head);
  if (!config_.learned_positions) {
    q_BNSD = pass.tapped(module + ".q_rope", apply_rotary(q_BNSD, tables), pass.tp_dim_of(fused, 1),
                         /*sequence_dim=*/2);
    k_BKSD = pass.tapped(module + ".k_rope", apply_rotary(k_BKSD, tables), pass.tp_dim_of(fused, 1),
                         /*sequence_dim=*/2);
  }
  const AttentionDropout dropout = pass.attention_dropout(
      module + ".core_attention.attention_dropout", fused, config_.attention_dropout);
  const at::Tensor core_BSN =
      pass.tapped(module + ".core_attention",
                  pass.strategy().attention(module, q_BNSD, k_BKSD, v_BKSD, attention_,
                                            SoftmaxDtype::kWide, dropout),
                  pass.tp_dim_of(fused, 2));
  return pass.tapped(module, pass.linear(out, core_BSN, config_.attention_out_bias),
                     pass.tp_dim_of(out, 2));
}

at::Tensor MegatronGpt::mlp(const ForwardPass& pass, const std::string& module,
                            const at::Tensor& x_BSH) const {
  const std::string in = module + ".linear_fc1", out = module + ".linear_fc2";
  const at::Tensor act = pass.tapped(
      module + ".act", at::gelu(pass.linear(in, x_BSH, config_.mlp_bias)), pass.tp_dim_of(in, 2));
  return pass.tapped(module, pass.linear(out, act, config_.mlp_bias), pass.tp_dim_of(out, 2));
}

// Dropout stands between a block and the residual addition (Megatron's bias_dropout_add), outside
// of the block's own output.
at::Tensor MegatronGpt::layer(const ForwardPass& pass, const std::string& module,
                              const at::Tensor& x_BSH, const RotaryTables& tables) const {
  pass.strategy().enter_block(module);
  const auto dropped = [&](const char* site, const at::Tensor& block_BSH) {
    return pass.dropout(module + site, block_BSH, config_.residual_dropout);
  };
  const at::Tensor attention_in_BSH =
      pass.layer_norm(module + ".input_layernorm", x_BSH, config_.norm_eps);
  const at::Tensor middle_BSH =
      x_BSH + dropped(".self_attn_bda",
                      attention(pass, module + ".self_attention", attention_in_BSH, tables));
  const at::Tensor mlp_in_BSH =
      pass.layer_norm(module + ".pre_mlp_layernorm", middle_BSH, config_.norm_eps);
  return pass.strategy().leave_block(
      module, pass.tapped(module, middle_BSH +
                                      dropped(".mlp_bda", mlp(pass, module + ".mlp", mlp_in_BSH))));
}

at::Tensor MegatronGpt::forward(const at::Tensor& input, const Parameters& parameters,
                                const Strategy& strategy, Sink* sink,
                                const TrainingPass& training) const {
  const ForwardPass pass(parameters, strategy, sink, training);
  at::Tensor x_BSH = input;
  if (pass.section().has_embedding) {
    check_input_ids(input, config_, strategy);
    x_BSH = embed(pass, input);
  }
  RotaryTables tables;
  if (!config_.learned_positions)
    tables = rotary_tables_of(pass, config_, input, x_BSH.scalar_type());
  for (std::int64_t number = pass.section().first_layer;
       number < pass.end_layer(config_.num_layers); ++number) {
    x_BSH = pass.layer(
        number, {x_BSH},
        [this, number, tables](const ForwardPass& own, std::span<const at::Tensor> inputs) {
          return layer(own, megatron_gpt_layer(number), inputs[0], tables);
        });
  }
  if (!pass.section().has_head) return x_BSH;
  x_BSH = pass.layer_norm("decoder.final_layernorm", x_BSH, config_.norm_eps);
  return pass.linear("output_layer", x_BSH,
                     config_.tie_word_embeddings ? kWordsWeight : "output_layer.weight");
}

void require_value(const ConfigFields& fields, const char* field, const std::string& only) {
  if (!fields.has(field) || fields.text(field) == only) return;
  const std::vector<std::string> known{only};
  fields.fail(field, fmt::format("must be {}, the only one that is built, got '{}'{}", only,
                                 fields.text(field), did_you_mean(fields.text(field), known)));
}

void parse_heads(const ConfigFields& fields, ModelConfig& config) {
  config.num_heads = fields.positive_integer("num_attention_heads");
  config.num_kv_heads = fields.has("num_query_groups") ? fields.positive_integer("num_query_groups")
                                                       : config.num_heads;
  if (config.num_heads % config.num_kv_heads != 0) {
    fields.fail("num_attention_heads",
                fmt::format("must be divisible by num_query_groups {}, got {}", config.num_kv_heads,
                            config.num_heads));
  }
  if (!fields.has("kv_channels") && config.hidden_size % config.num_heads != 0) {
    fields.fail(
        "hidden_size",
        fmt::format(
            "must be divisible by num_attention_heads {} where kv_channels is missing, got {}",
            config.num_heads, config.hidden_size));
  }
  config.head_dim = fields.has("kv_channels") ? fields.positive_integer("kv_channels")
                                              : config.hidden_size / config.num_heads;
}

void parse_positions(const ConfigFields& fields, ModelConfig& config) {
  config.max_positions = fields.positive_integer("max_position_embeddings");
  const std::string type = fields.text("position_embedding_type");
  const std::vector<std::string> known{"learned_absolute", "rope"};
  if (type != known[0] && type != known[1]) {
    fields.fail("position_embedding_type",
                fmt::format("must be one of {}, got '{}'{}", join_names(known), type,
                            did_you_mean(type, known)));
  }
  config.learned_positions = type == known[0];
  if (config.learned_positions) return;
  config.rope.theta = fields.positive_number("rotary_base");
  if (config.head_dim % 2 != 0) {
    fields.fail(
        "kv_channels",
        fmt::format(
            "(or hidden_size / num_attention_heads) must be even for rotary positions, got {}",
            config.head_dim));
  }
}

ModelConfig parse_megatron_gpt(const ConfigFields& fields) {
  ModelConfig config;
  config.vocab_size = fields.positive_integer("vocab_size");
  config.hidden_size = fields.positive_integer("hidden_size");
  config.intermediate_size = fields.has("ffn_hidden_size")
                                 ? fields.positive_integer("ffn_hidden_size")
                                 : 4 * config.hidden_size;
  config.num_layers = fields.num_layers("num_layers");
  parse_heads(fields, config);
  parse_positions(fields, config);
  config.norm_eps = fields.positive_number("layernorm_epsilon");
  config.initializer_range = fields.non_negative_number("init_method_std");
  config.tie_word_embeddings = fields.boolean("share_embeddings_and_output_weights");
  const bool has_biases = fields.boolean("add_bias_linear", true);
  config.attention_out_bias = config.mlp_bias = has_biases;
  config.qkv_bias = has_biases || fields.boolean("add_qkv_bias", false);
  require_value(fields, "normalization", "LayerNorm");
  require_value(fields, "activation", "gelu");
  config.attention_dropout = dropout_rate(fields, "attention_dropout");
  config.embedding_dropout = config.residual_dropout = dropout_rate(fields, "hidden_dropout");
  return config;
}

nlohmann::json write_megatron_gpt(const ModelConfig& config) {
  nlohmann::json json = {
      {"model_type", config.model_type},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.hidden_size},
      {"ffn_hidden_size", config.intermediate_size},
      {"num_layers", config.num_layers},
      {"num_attention_heads", config.num_heads},
      {"num_query_groups", config.num_kv_heads},
      {"kv_channels", config.head_dim},
      {"max_position_embeddings", config.max_positions},
      {"position_embedding_type", config.learned_positions ? "learned_absolute" : "rope"},
      {"layernorm_epsilon", config.norm_eps},
      {"init_method_std", config.initializer_range},
      {"share_embeddings_and_output_weights", config.tie_word_embeddings},
      {"add_bias_linear", config.mlp_bias},
      {"add_qkv_bias", config.qkv_bias},
      {"normalization", "LayerNorm"},
      {"activation", "gelu"},
      {"attention_dropout", config.attention_dropout},
      {"hidden_dropout", config.residual_dropout}};
  if (!config.learned_positions) json["rotary_base"] = config.rope.theta;
  return json;
}

std::unique_ptr<Model> make_megatron_gpt(const ModelConfig& config, AttentionImpl attention) {
  return std::make_unique<MegatronGpt>(config, attention);
}

}  // namespace

Architecture megatron_gpt_architecture() {
  return {"megatron_gpt", parse_megatron_gpt, write_megatron_gpt, make_megatron_gpt, kAllDropouts};
}

}  // namespace isoshard
