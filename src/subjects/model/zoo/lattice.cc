// SPDX-License-Identifier: Apache-2.0
// The lattice model: a decoder whose every value, forward and
// backward, is a small multiple of a power of two, so that any order of additions gives the same
// bits. Rows of weights have one or two entries of -1 or 1; attention is linear (no softmax); relu;
// no norm; the loss is linear. Queries and keys read the embedding, not the stream, so that values
// grow by a factor per layer, not by a power.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "subjects/model/config/config_parts.h"
#include "subjects/model/zoo/blocks.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

constexpr std::string_view kEmbedding = "model.embed_tokens",
                           kEmbeddingWeight = "model.embed_tokens.weight";

std::string lattice_layer(std::int64_t layer) {
  return fmt::format("model.layers.{}", layer);
}

class Lattice final : public Model {
 public:
  explicit Lattice(const ModelConfig& config) : config_(config) {}
  [[nodiscard]] const ModelConfig& config() const noexcept override { return config_; }
  [[nodiscard]] LossKind loss_kind() const noexcept override { return LossKind::kLinear; }
  [[nodiscard]] std::vector<ParameterSpec> parameters() const override;
  [[nodiscard]] at::Tensor forward(const at::Tensor& input, const Parameters& parameters,
                                   const Strategy& strategy, Sink* sink,
                                   const TrainingPass& training) const override;

 private:
  [[nodiscard]] at::Tensor attention(const ForwardPass& pass, const std::string& module,
                                     const at::Tensor& embedded_BSH, const at::Tensor& x_BSH) const;
  [[nodiscard]] at::Tensor mlp(const ForwardPass& pass, const std::string& module,
                               const at::Tensor& x_BSH) const;
  [[nodiscard]] at::Tensor layer(const ForwardPass& pass, const std::string& module,
                                 const at::Tensor& x_BSH, const at::Tensor& embedded_BSH) const;

  ModelConfig config_;
};

std::vector<ParameterSpec> Lattice::parameters() const {
  const std::int64_t hidden = config_.hidden_size, ffn = config_.intermediate_size,
                     head = config_.head_dim;
  const std::int64_t q_features = config_.num_heads * head,
                     kv_features = config_.num_kv_heads * head;
  std::vector<ParameterSpec> specs;
  const auto weight = [&](const std::string& module, std::int64_t out, std::int64_t in,
                          const TpSplit& split) {
    specs.push_back({module + ".weight",
                     {out, in},
                     ParamClass::kMatrix,
                     ParamInit::kSparseRows,
                     split,
                     config_.row_nonzeros});
  };
  const auto column = [&](const std::string& module, std::int64_t out, bool has_bias,
                          std::int64_t unit, bool is_kv) {
    const TpSplit rows{TpRole::kColumn, 0, unit, {}, is_kv};
    weight(module, out, hidden, rows);
    if (has_bias)
      specs.push_back({module + ".bias", {out}, ParamClass::kBias, ParamInit::kSigns, rows});
  };
  const auto row = [&](const std::string& module, std::int64_t in, bool has_bias,
                       std::int64_t unit) {
    weight(module, hidden, in, {TpRole::kRow, 1, unit});
    if (has_bias)
      specs.push_back({module + ".bias", {hidden}, ParamClass::kRowBias, ParamInit::kSigns});
  };

  const TpSplit vocabulary_rows{TpRole::kVocab, 0};
  specs.push_back({std::string(kEmbeddingWeight),
                   {config_.vocab_size, hidden},
                   ParamClass::kEmbedding,
                   ParamInit::kSigns,
                   vocabulary_rows});
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
    const std::string attention = lattice_layer(layer) + ".self_attn",
                      mlp = lattice_layer(layer) + ".mlp";
    column(attention + ".q_proj", q_features, config_.qkv_bias, head, false);
    column(attention + ".k_proj", kv_features, config_.qkv_bias, head, true);
    column(attention + ".v_proj", kv_features, config_.qkv_bias, head, true);
    row(attention + ".o_proj", q_features, config_.attention_out_bias, head);
    column(mlp + ".up_proj", ffn, config_.mlp_bias, 1, false);
    row(mlp + ".down_proj", ffn, config_.mlp_bias, 1);
  }
  weight("lm_head", config_.vocab_size, hidden, vocabulary_rows);
  return specs;
}

at::Tensor Lattice::attention(const ForwardPass& pass, const std::string& module,
                              const at::Tensor& embedded_BSH, const at::Tensor& x_BSH) const {
  const std::string q_name = module + ".q_proj", k_name = module + ".k_proj",
                    v_name = module + ".v_proj", o_name = module + ".o_proj";
  const auto heads = [&](const std::string& name, const at::Tensor& in) {  // [B,heads,S,D]
    return split_heads(name, pass.linear(name, in, config_.qkv_bias), config_.head_dim)
        .transpose(1, 2);
  };
  const at::Tensor q_BNSD = heads(q_name, embedded_BSH), own_k_BKSD = heads(k_name, embedded_BSH),
                   own_v_BKSD = heads(v_name, x_BSH);
  const auto [k_BKSD, v_BKSD] = pass.strategy().whole_context(module, own_k_BKSD, own_v_BKSD);
  const std::int64_t groups = q_BNSD.size(1) / k_BKSD.size(1);
  const at::Tensor positions = pass.strategy().token_positions(q_BNSD.size(2));
  at::Tensor scores_BNSS = at::matmul(q_BNSD, repeat_kv(k_BKSD, groups).transpose(2, 3));
  scores_BNSS =
      positions.defined()
          ? scores_BNSS.masked_fill(later_tokens(positions, k_BKSD.size(2)).to(q_BNSD.device()), 0)
          : scores_BNSS.tril();
  const at::Tensor core_BNSD = at::matmul(scores_BNSS, repeat_kv(v_BKSD, groups));
  const at::Tensor core_BSN =
      pass.tapped(module + ".core", core_BNSD.transpose(1, 2).contiguous().flatten(2),
                  pass.tp_dim_of(q_name, 2));
  return pass.tapped(module, pass.linear(o_name, core_BSN, config_.attention_out_bias),
                     pass.tp_dim_of(o_name, 2));
}

at::Tensor Lattice::mlp(const ForwardPass& pass, const std::string& module,
                        const at::Tensor& x_BSH) const {
  const std::string up_name = module + ".up_proj", down_name = module + ".down_proj";
  const at::Tensor act =
      pass.tapped(module + ".act", at::relu(pass.linear(up_name, x_BSH, config_.mlp_bias)),
                  pass.tp_dim_of(up_name, 2));
  return pass.tapped(module, pass.linear(down_name, act, config_.mlp_bias),
                     pass.tp_dim_of(down_name, 2));
}

at::Tensor Lattice::layer(const ForwardPass& pass, const std::string& module,
                          const at::Tensor& x_BSH, const at::Tensor& embedded_BSH) const {
  pass.strategy().enter_block(module);
  const at::Tensor middle_BSH = x_BSH + attention(pass, module + ".self_attn", embedded_BSH, x_BSH);
  return pass.strategy().leave_block(
      module, pass.tapped(module, middle_BSH + mlp(pass, module + ".mlp", middle_BSH)));
}

// Between sections go the stream and, behind it, the embedding.
at::Tensor Lattice::forward(const at::Tensor& input, const Parameters& parameters,
                            const Strategy& strategy, Sink* sink,
                            const TrainingPass& training) const {
  const ForwardPass pass(parameters, strategy, sink, training);
  at::Tensor x_BSH, embedded_BSH;
  if (pass.section().has_embedding) {
    check_input_ids(input, config_, strategy);
    embedded_BSH = pass.tapped(
        kEmbedding, strategy.embedding(kEmbedding, input, pass.parameter(kEmbeddingWeight), sink),
        pass.tp_dim_of(kEmbedding, 2));
    x_BSH = embedded_BSH;
  } else {
    x_BSH = input.narrow(2, 0, config_.hidden_size);
    embedded_BSH = input.narrow(2, config_.hidden_size, config_.hidden_size);
  }
  for (std::int64_t number = pass.section().first_layer;
       number < pass.end_layer(config_.num_layers); ++number) {
    x_BSH = pass.layer(number, {x_BSH, embedded_BSH},
                       [this, number](const ForwardPass& own, std::span<const at::Tensor> inputs) {
                         return layer(own, lattice_layer(number), inputs[0], inputs[1]);
                       });
  }
  if (!pass.section().has_head) return at::cat({x_BSH, embedded_BSH}, 2);
  return pass.linear("lm_head", x_BSH, std::string_view("lm_head.weight"));
}

ModelConfig parse_lattice(const ConfigFields& fields) {
  ModelConfig config;
  config.vocab_size = fields.positive_integer("vocab_size");
  config.hidden_size = fields.positive_integer("hidden_size");
  config.intermediate_size = fields.positive_integer("intermediate_size");
  config.num_layers = fields.num_layers("num_hidden_layers");
  config.num_heads = fields.positive_integer("num_attention_heads");
  config.num_kv_heads = fields.positive_integer("num_key_value_heads");
  config.head_dim = fields.positive_integer("head_dim");
  config.max_positions = fields.positive_integer("max_position_embeddings");
  config.row_nonzeros = fields.positive_integer("row_nonzeros");
  config.qkv_bias = fields.boolean("qkv_bias", false);
  config.attention_out_bias = fields.boolean("attention_out_bias", false);
  config.mlp_bias = fields.boolean("mlp_bias", false);
  if (config.num_heads % config.num_kv_heads != 0) {
    fields.fail("num_attention_heads",
                fmt::format("must be divisible by num_key_value_heads {}, got {}",
                            config.num_kv_heads, config.num_heads));
  }
  const std::int64_t shortest_row =
      std::min({config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim});
  if (config.row_nonzeros > shortest_row) {
    fields.fail("row_nonzeros",
                fmt::format("must be at most {}, the entries of the shortest row, got {}",
                            shortest_row, config.row_nonzeros));
  }
  return config;
}

nlohmann::json write_lattice(const ModelConfig& config) {
  nlohmann::json json = sizes_to_json(config);
  json.update({{"row_nonzeros", config.row_nonzeros},
               {"qkv_bias", config.qkv_bias},
               {"attention_out_bias", config.attention_out_bias},
               {"mlp_bias", config.mlp_bias}});
  return json;
}

std::unique_ptr<Model> make_lattice(const ModelConfig& config, AttentionImpl /*attention*/) {
  return std::make_unique<Lattice>(config);
}

}  // namespace

Architecture lattice_architecture() {
  return {"lattice", parse_lattice, write_lattice, make_lattice, {}};
}

}  // namespace isoshard
