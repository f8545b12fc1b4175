// SPDX-License-Identifier: Apache-2.0
// Every architecture, at sizes and switches that no oracle case
// has, against the formulas written out head by head in fp64.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "core/base/error.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/weights.h"
#include "subjects/model/zoo/blocks.h"

namespace isoshard {
namespace {

/// What one case has of its own; the names of biases and norms follow from model_type.
struct Sizes {
  const char* slug;
  const char* model_type;
  std::int64_t heads, kv_heads, head_dim, hidden, ffn, vocabulary, layers;
  bool tied, attention_bias, mlp_bias;
  RopeConfig rope;
};
void PrintTo(const Sizes& sizes, std::ostream* out) {
  *out << sizes.slug;
}

const RopeConfig kRope{"default", 100.0}, kLlama3Rope{"llama3", 1000.0, 8.0, 1.0, 4.0, 16};

std::vector<Sizes> all_sizes() {
  return {
      {"qwen2_1_kv_head_1_layer", "qwen2", 5, 1, 8, 40, 24, 97, 1, true, true, false, kRope},
      {"qwen2_3_kv_heads_3_layers", "qwen2", 6, 3, 6, 36, 50, 61, 3, false, true, false, kRope},
      {"qwen3_1_head", "qwen3", 1, 1, 10, 24, 20, 33, 3, true, false, false, kRope},
      {"qwen3_3_kv_heads_bias", "qwen3", 9, 3, 4, 20, 31, 53, 1, false, true, false, kRope},
      {"llama_1_kv_head_biases", "llama", 4, 1, 6, 24, 44, 71, 3, false, true, true, kRope},
      {"llama_3_kv_heads_mlp_bias", "llama", 3, 3, 8, 24, 18, 101, 1, true, false, true, kRope},
      {"llama3_rope_odd_vocabulary", "llama", 6, 2, 12, 36, 20, 83, 1, true, false, false,
       kLlama3Rope},
      {"mistral_3_kv_heads_own_head_dim", "mistral", 6, 3, 8, 20, 26, 47, 2, false, false, false,
       kRope},
      {"gpt2_3_heads_1_layer", "gpt2", 3, 3, 7, 21, 50, 59, 1, true, true, true, kRope},
      {"gpt2_1_head_3_layers", "gpt2", 1, 1, 12, 12, 17, 37, 3, false, true, true, kRope},
      {"megatron_learned_2_groups", "megatron_gpt", 6, 2, 5, 24, 31, 57, 2, false, true, true,
       kRope},
      {"megatron_learned_tied_no_biases", "megatron_gpt", 1, 1, 8, 12, 20, 41, 1, true, false,
       false, kRope},
      {"megatron_rope_qkv_bias", "megatron_gpt", 3, 1, 8, 20, 33, 43, 3, true, true, false, kRope},
  };
}

ModelConfig config_of(const Sizes& sizes) {
  ModelConfig config;
  config.model_type = sizes.model_type;
  config.vocab_size = sizes.vocabulary;
  config.hidden_size = sizes.hidden;
  config.intermediate_size = sizes.ffn;
  config.num_layers = sizes.layers;
  config.num_heads = sizes.heads;
  config.num_kv_heads = sizes.kv_heads;
  config.head_dim = sizes.head_dim;
  config.max_positions = 64;
  config.norm_eps = 1e-3;  // large enough to be seen
  config.tie_word_embeddings = sizes.tied;
  config.qkv_bias = sizes.attention_bias;
  config.attention_out_bias = config.model_type == "megatron_gpt"
                                  ? sizes.mlp_bias
                                  : sizes.attention_bias && config.model_type != "qwen2";
  config.mlp_bias = sizes.mlp_bias;
  config.qk_norm = config.model_type == "qwen3";
  config.learned_positions = std::string_view(sizes.slug).find("learned") != std::string_view::npos;
  config.rope = sizes.rope;
  return config;
}

Parameters parameters_of(const Model& model, bool requires_grad = false) {
  const InitialWeights weights(23, 0.3, /*generic=*/true);
  Parameters parameters;
  for (const ParameterSpec& spec : model.parameters()) {
    const at::Tensor value =
        weights.read(spec, Shape(spec.shape.size(), 0), spec.shape).to(at::kDouble);
    parameters.emplace(spec.name, value.requires_grad_(requires_grad));
  }
  return parameters;
}

at::Tensor ids_of(std::int64_t batch, std::int64_t length, std::int64_t vocabulary) {
  return (at::arange(batch * length, at::kLong) * 37 % vocabulary).view({batch, length});
}

/// One sample through the formulas, one position and one head at a time. Knows nothing of blocks,
/// ops or strategies.
class Naive {
 public:
  Naive(const ModelConfig& config, const Parameters& parameters)
      : config_(&config), parameters_(&parameters) {}

  [[nodiscard]] at::Tensor logits(const at::Tensor& ids_S) const {
    if (config_->model_type == "megatron_gpt") return megatron_gpt(ids_S);
    return is_gpt2() ? gpt2(ids_S) : rotary(ids_S);
  }

 private:
  [[nodiscard]] bool is_gpt2() const { return config_->model_type == "gpt2"; }
  [[nodiscard]] const at::Tensor& get(const std::string& name) const {
    return parameters_->at(name);
  }

  /// x [S, in] with a weight [out, in], or [in, out] in GPT-2; a bias if there is one.
  [[nodiscard]] at::Tensor affine(const std::string& module, const at::Tensor& x) const {
    const at::Tensor weight = is_gpt2() ? get(module + ".weight") : get(module + ".weight").t();
    at::Tensor y = (x.unsqueeze(2) * weight.unsqueeze(0)).sum(1);
    if (parameters_->contains(module + ".bias")) y = y + get(module + ".bias");
    return y;
  }
  [[nodiscard]] at::Tensor rms(const std::string& name, const at::Tensor& x) const {
    return x / (x * x).mean(-1, true).add(config_->norm_eps).sqrt() * get(name + ".weight");
  }
  [[nodiscard]] at::Tensor layer_norm(const std::string& name, const at::Tensor& x) const {
    const at::Tensor centred = x - x.mean(-1, true);
    return centred / (centred * centred).mean(-1, true).add(config_->norm_eps).sqrt() *
               get(name + ".weight") +
           get(name + ".bias");
  }

  [[nodiscard]] double frequency(std::int64_t pair) const {
    const RopeConfig& rope = config_->rope;
    const double plain = std::pow(
        rope.theta, -2.0 * static_cast<double>(pair) / static_cast<double>(config_->head_dim));
    if (rope.type == "default") return plain;
    const double turns =
        static_cast<double>(rope.original_max_positions) * plain / (2 * std::numbers::pi);
    if (turns > rope.high_freq_factor) return plain;
    if (turns < rope.low_freq_factor) return plain / rope.factor;
    const double kept =
        (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
    return (1 - kept) * plain / rope.factor + kept * plain;
  }
  /// One head [S, D].
  [[nodiscard]] at::Tensor rotated(const at::Tensor& x) const {
    const std::int64_t half = config_->head_dim / 2;
    at::Tensor y = at::zeros_like(x);
    for (std::int64_t position = 0; position < x.size(0); ++position) {
      for (std::int64_t pair = 0; pair < half; ++pair) {
        // Frequencies are fp32 values in every dtype.
        const double angle = static_cast<double>(position) *
                             static_cast<double>(static_cast<float>(frequency(pair)));
        const double a = x[position][pair].item<double>(),
                     b = x[position][pair + half].item<double>();
        y[position][pair] = a * std::cos(angle) - b * std::sin(angle);
        y[position][pair + half] = b * std::cos(angle) + a * std::sin(angle);
      }
    }
    return y;
  }
  /// One head: position t sees positions 0 to t.
  [[nodiscard]] at::Tensor attended(const at::Tensor& q, const at::Tensor& k,
                                    const at::Tensor& v) const {
    std::vector<at::Tensor> rows;
    for (std::int64_t t = 0; t < q.size(0); ++t) {
      const at::Tensor scores =
          (k.slice(0, 0, t + 1) * q[t]).sum(1) / std::sqrt(static_cast<double>(config_->head_dim));
      const at::Tensor weights = scores.exp() / scores.exp().sum();
      rows.push_back((weights.unsqueeze(1) * v.slice(0, 0, t + 1)).sum(0));
    }
    return at::stack(rows);
  }

  [[nodiscard]] at::Tensor rotary_attention(const std::string& module, const at::Tensor& x) const {
    const std::int64_t dim = config_->head_dim, group = config_->num_heads / config_->num_kv_heads;
    const at::Tensor q = affine(module + ".q_proj", x), k = affine(module + ".k_proj", x),
                     v = affine(module + ".v_proj", x);
    std::vector<at::Tensor> heads;
    for (std::int64_t head = 0; head < config_->num_heads; ++head) {
      at::Tensor q_head = q.slice(1, head * dim, (head + 1) * dim);
      const std::int64_t begin = head / group * dim;
      at::Tensor k_head = k.slice(1, begin, begin + dim);
      if (config_->model_type == "qwen3")
        q_head = rms(module + ".q_norm", q_head), k_head = rms(module + ".k_norm", k_head);
      heads.push_back(attended(rotated(q_head), rotated(k_head), v.slice(1, begin, begin + dim)));
    }
    return affine(module + ".o_proj", at::cat(heads, 1));
  }

  [[nodiscard]] at::Tensor rotary(const at::Tensor& ids_S) const {
    at::Tensor x = get("model.embed_tokens.weight").index_select(0, ids_S);
    for (std::int64_t i = 0; i < config_->num_layers; ++i) {
      const std::string layer = fmt::format("model.layers.{}", i), mlp = layer + ".mlp";
      x = x + rotary_attention(layer + ".self_attn", rms(layer + ".input_layernorm", x));
      const at::Tensor in = rms(layer + ".post_attention_layernorm", x),
                       gate = affine(mlp + ".gate_proj", in);
      x = x +
          affine(mlp + ".down_proj", gate / (1 + gate.neg().exp()) * affine(mlp + ".up_proj", in));
    }
    return at::matmul(
        rms("model.norm", x),
        get(config_->tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight").t());
  }

  [[nodiscard]] at::Tensor gpt2(const at::Tensor& ids_S) const {
    const std::int64_t dim = config_->head_dim, hidden = config_->hidden_size;
    at::Tensor x = get("transformer.wte.weight").index_select(0, ids_S) +
                   get("transformer.wpe.weight").slice(0, 0, ids_S.size(0));
    for (std::int64_t i = 0; i < config_->num_layers; ++i) {
      const std::string layer = fmt::format("transformer.h.{}", i);
      const at::Tensor qkv = affine(layer + ".attn.c_attn", layer_norm(layer + ".ln_1", x));
      std::vector<at::Tensor> heads;
      for (std::int64_t head = 0; head < config_->num_heads; ++head) {
        const auto part = [&](std::int64_t which) {
          return qkv.slice(1, which * hidden + head * dim, which * hidden + (head + 1) * dim);
        };
        heads.push_back(attended(part(0), part(1), part(2)));
      }
      x = x + affine(layer + ".attn.c_proj", at::cat(heads, 1));
      const at::Tensor wide = affine(layer + ".mlp.c_fc", layer_norm(layer + ".ln_2", x));
      const at::Tensor bent =
          wide * 0.5 *
          (1 + ((wide + 0.044715 * wide * wide * wide) * std::sqrt(2 / std::numbers::pi)).tanh());
      x = x + affine(layer + ".mlp.c_proj", bent);
    }
    const at::Tensor head =
        get(config_->tie_word_embeddings ? "transformer.wte.weight" : "lm_head.weight");
    return at::matmul(layer_norm("transformer.ln_f", x), head.t());
  }

  /// Rows of linear_qkv: for each kv group its query heads, its key head, its value head.
  [[nodiscard]] at::Tensor megatron_attention(const std::string& module,
                                              const at::Tensor& x) const {
    const std::int64_t dim = config_->head_dim, group = config_->num_heads / config_->num_kv_heads;
    const at::Tensor qkv = affine(module + ".linear_qkv", x);
    std::vector<at::Tensor> heads;
    for (std::int64_t head = 0; head < config_->num_heads; ++head) {
      const std::int64_t first_row = head / group * (group + 2) * dim;
      const auto part = [&](std::int64_t place) {
        return qkv.slice(1, first_row + place * dim, first_row + (place + 1) * dim);
      };
      at::Tensor q = part(head % group), k = part(group);
      if (!config_->learned_positions) q = rotated(q), k = rotated(k);
      heads.push_back(attended(q, k, part(group + 1)));
    }
    return affine(module + ".linear_proj", at::cat(heads, 1));
  }

  [[nodiscard]] at::Tensor megatron_gpt(const at::Tensor& ids_S) const {
    at::Tensor x = get("embedding.word_embeddings.weight").index_select(0, ids_S);
    if (config_->learned_positions)
      x = x + get("embedding.position_embeddings.weight").slice(0, 0, ids_S.size(0));
    for (std::int64_t i = 0; i < config_->num_layers; ++i) {
      const std::string layer = fmt::format("decoder.layers.{}", i);
      x = x +
          megatron_attention(layer + ".self_attention", layer_norm(layer + ".input_layernorm", x));
      const at::Tensor wide =
          affine(layer + ".mlp.linear_fc1", layer_norm(layer + ".pre_mlp_layernorm", x));
      x = x +
          affine(layer + ".mlp.linear_fc2", wide * 0.5 * (1 + at::erf(wide / std::numbers::sqrt2)));
    }
    const at::Tensor head = get(config_->tie_word_embeddings ? "embedding.word_embeddings.weight"
                                                             : "output_layer.weight");
    return at::matmul(layer_norm("decoder.final_layernorm", x), head.t());
  }

  const ModelConfig* config_;
  const Parameters* parameters_;
};

class Architectures : public testing::TestWithParam<Sizes> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Architectures, testing::ValuesIn(all_sizes()),
                         [](const auto& tested) { return tested.param.slug; });

TEST_P(Architectures, AreTheFormulasInFp64) {
  const ModelConfig config = config_of(GetParam());
  for (const AttentionImpl attention : {AttentionImpl::kEager, AttentionImpl::kSdpa}) {
    const auto model = make_model(config, attention);
    const Parameters parameters = parameters_of(*model);
    for (const auto& [batch, length] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {2, 13}}) {
      const at::Tensor ids = ids_of(batch, length, config.vocab_size);

      const at::Tensor actual = model->forward(ids, parameters, Strategy(), nullptr);

      for (std::int64_t sample = 0; sample < batch; ++sample) {
        const at::Tensor expected = Naive(config, parameters).logits(ids[sample]);
        // The rounding of an fp32 frequency may differ in its last bit between pow of a tensor and
        // std::pow: 6e-8 times an angle.
        const double bound =
            config.model_type == "gpt2" || config.learned_positions || length == 1 ? 1e-13 : 5e-6;
        EXPECT_LE(((actual[sample] - expected).norm() / expected.norm()).item<double>(), bound)
            << name_of(attention) << ' ' << sample;
      }
    }
  }
}

TEST_P(Architectures, GradientsAreTheSlopesOfTheOutput) {
  const ModelConfig config = config_of(GetParam());
  const auto model = make_model(config, AttentionImpl::kEager);
  Parameters parameters = parameters_of(*model, /*requires_grad=*/true);
  const at::Tensor ids = ids_of(2, 5, config.vocab_size);
  const auto value = [&] {
    return model->forward(ids, parameters, Strategy(), nullptr).sin().sum();
  };
  value().backward();
  constexpr double kStep = 1e-5;

  for (auto& [name, parameter] : parameters) {
    ASSERT_TRUE(parameter.grad().defined()) << name;
    const at::Tensor direction =
        at::arange(parameter.numel(), at::kDouble).mul(1.7).cos().view(parameter.sizes());
    const at::Tensor saved = parameter.detach().clone();
    const at::NoGradGuard no_grad;

    parameter.add_(direction, kStep);
    const double above = value().item<double>();
    parameter.copy_(saved).sub_(direction, kStep);
    const double below = value().item<double>();
    parameter.copy_(saved);

    const double slope = (parameter.grad() * direction).sum().item<double>();
    EXPECT_NEAR((above - below) / (2 * kStep), slope, 1e-5 * (1 + std::abs(slope))) << name;
  }
}

TEST_P(Architectures, HaveTheParametersThatTheConfigurationAsksFor) {
  const Sizes& sizes = GetParam();
  const auto model = make_model(config_of(sizes), AttentionImpl::kEager);

  std::map<std::string, ParameterSpec> specs;
  for (const ParameterSpec& spec : model->parameters())
    EXPECT_TRUE(specs.emplace(spec.name, spec).second) << spec.name;

  const bool is_gpt2 = std::string_view(sizes.model_type) == "gpt2";
  const bool is_megatron = std::string_view(sizes.model_type) == "megatron_gpt";
  EXPECT_EQ(specs.contains(is_megatron ? "output_layer.weight" : "lm_head.weight"), !sizes.tied);
  if (is_gpt2) return;
  if (is_megatron) {
    EXPECT_EQ(specs.contains("decoder.layers.0.self_attention.linear_qkv.bias"),
              sizes.attention_bias);
    EXPECT_EQ(specs.contains("decoder.layers.0.mlp.linear_fc2.bias"), sizes.mlp_bias);
    EXPECT_EQ(specs.contains("embedding.position_embeddings.weight"),
              model->config().learned_positions);
    return;
  }
  const bool is_qwen2 = std::string_view(sizes.model_type) == "qwen2";
  EXPECT_EQ(specs.contains("model.layers.0.self_attn.k_proj.bias"), sizes.attention_bias);
  EXPECT_EQ(specs.contains("model.layers.0.self_attn.o_proj.bias"),
            sizes.attention_bias && !is_qwen2);
  EXPECT_EQ(specs.contains("model.layers.0.mlp.down_proj.bias"), sizes.mlp_bias);
  EXPECT_EQ(specs.contains("model.layers.0.self_attn.q_norm.weight"),
            std::string_view(sizes.model_type) == "qwen3");
}

/// What tensor parallelism needs to know, taken at its word: each rank with its parts of every
/// parameter, row outputs summed.
class SlicedStrategy final : public Strategy {
 public:
  SlicedStrategy(const std::vector<ParameterSpec>& specs, int rank, int degree)
      : rank_(rank), degree_(degree) {
    for (const ParameterSpec& spec : specs) splits_.emplace(spec.name, spec.tp);
  }
  /// This rank's part of a parameter: of each section its share, in whole units.
  [[nodiscard]] at::Tensor part_of(const std::string& name, const at::Tensor& whole) const {
    const TpSplit& split = splits_.at(name);
    if (split.role == TpRole::kReplicated || split.role == TpRole::kVocab) return whole;
    std::vector<std::int64_t> sections = split.sections;
    if (sections.empty()) sections.push_back(whole.size(split.dim));
    std::vector<at::Tensor> parts;
    std::int64_t begin = 0;
    for (const std::int64_t size : sections) {
      EXPECT_EQ(size % (split.unit * degree_), 0) << name;
      parts.push_back(whole.narrow(split.dim, begin + rank_ * size / degree_, size / degree_));
      begin += size;
    }
    EXPECT_EQ(begin, whole.size(split.dim)) << name;
    return at::cat(parts, split.dim);
  }
  [[nodiscard]] bool splits_output(std::string_view module) const override {
    const auto split = splits_.find(std::string(module) + ".weight");  // a tied head has none
    return split != splits_.end() && split->second.role == TpRole::kColumn;
  }
  [[nodiscard]] int tp_degree() const noexcept override { return degree_; }

 private:
  std::map<std::string, TpSplit> splits_;
  int rank_, degree_;
};

/// Keeps the outputs of row-parallel modules, and puts the sum over ranks in their place.
class RowSums final : public Sink {
 public:
  RowSums(const Parameters& biases, std::map<std::string, at::Tensor> sums)
      : biases_(&biases), sums_(std::move(sums)) {}
  void begin_step(int /*step*/) override {}
  [[nodiscard]] at::Tensor on_activation(const Site& site, at::Tensor value) override {
    const bool is_row = site.name.ends_with("o_proj") || site.name.ends_with("down_proj") ||
                        site.name.ends_with("c_proj") || site.name.ends_with("linear_proj") ||
                        site.name.ends_with("linear_fc2");
    if (!is_row) return value;
    const auto bias = biases_->find(site.name + ".bias");
    own_.insert_or_assign(site.name, bias == biases_->end() ? value : value - bias->second);
    const auto sum = sums_.find(site.name);
    if (sum == sums_.end()) return value;
    return bias == biases_->end() ? sum->second : sum->second + bias->second;
  }
  [[nodiscard]] at::Tensor on_activation_grad(const Site& /*site*/, at::Tensor gradient) override {
    return gradient;
  }
  void on_record(const Site& /*site*/, const at::Tensor& /*value*/) override {}
  [[nodiscard]] const std::map<std::string, at::Tensor>& own() const { return own_; }

 private:
  const Parameters* biases_;
  std::map<std::string, at::Tensor> sums_, own_;
};

TEST(TpSplits, PartsOfAllParametersGiveTheWholeModel) {
  for (const Sizes& sizes :
       {Sizes{"", "qwen3", 6, 3, 4, 20, 15, 31, 2, true, true, false, kRope},
        Sizes{"", "llama", 3, 3, 6, 12, 9, 29, 2, false, true, true, kRope},
        Sizes{"", "gpt2", 3, 3, 4, 12, 18, 29, 2, true, true, true, kRope},
        Sizes{"", "megatron_gpt", 6, 3, 4, 20, 15, 31, 2, false, true, true, kRope}}) {
    const auto model = make_model(config_of(sizes), AttentionImpl::kEager);
    const Parameters whole = parameters_of(*model);
    const at::Tensor ids = ids_of(2, 7, sizes.vocabulary);
    constexpr int kDegree = 3;

    // Each round settles one more row sum: what follows an unsummed one is wrong until the next
    // round.
    std::map<std::string, at::Tensor> sums;
    at::Tensor logits;
    for (std::int64_t round = 0; round <= 2 * sizes.layers; ++round) {
      std::map<std::string, at::Tensor> next;
      for (int rank = 0; rank < kDegree; ++rank) {
        const SlicedStrategy strategy(model->parameters(), rank, kDegree);
        Parameters local;
        for (const auto& [name, tensor] : whole)
          local.emplace(name, strategy.part_of(name, tensor));
        RowSums sink(whole, sums);
        logits = model->forward(ids, local, strategy, &sink);
        for (const auto& [name, partial] : sink.own())
          next[name] = next.contains(name) ? next[name] + partial : partial;
      }
      ASSERT_EQ(next.size(), static_cast<std::size_t>(2 * sizes.layers)) << sizes.model_type;
      sums = next;
    }

    const at::Tensor expected = model->forward(ids, whole, Strategy(), nullptr);
    EXPECT_LE(((logits - expected).norm() / expected.norm()).item<double>(), 1e-13)
        << sizes.model_type;
  }
}

TEST(TpSplits, AreRightForFusedAndTransposedWeights) {
  std::map<std::string, ParameterSpec> specs;
  for (const ParameterSpec& spec :
       make_model(builtin_config("gpt2"), AttentionImpl::kSdpa)->parameters())
    specs[spec.name] = spec;
  const std::string layer = "transformer.h.11.";

  EXPECT_EQ(specs.at(layer + "attn.c_attn.weight").shape, (Shape{768, 2304}));
  EXPECT_EQ(specs.at(layer + "attn.c_attn.weight").tp,
            (TpSplit{TpRole::kColumn, 1, 64, {768, 768, 768}}));
  EXPECT_EQ(specs.at(layer + "attn.c_attn.bias").tp,
            (TpSplit{TpRole::kColumn, 0, 64, {768, 768, 768}}));
  EXPECT_EQ(specs.at(layer + "attn.c_attn.bias").param_class, ParamClass::kBias);
  EXPECT_EQ(specs.at(layer + "attn.c_proj.weight").tp, (TpSplit{TpRole::kRow, 0, 64}));
  EXPECT_EQ(specs.at(layer + "attn.c_proj.bias").tp, TpSplit{});
  EXPECT_EQ(specs.at(layer + "attn.c_proj.bias").param_class, ParamClass::kRowBias);
  EXPECT_EQ(specs.at(layer + "mlp.c_fc.weight").tp, (TpSplit{TpRole::kColumn, 1}));
  EXPECT_EQ(specs.at(layer + "mlp.c_proj.weight").tp, (TpSplit{TpRole::kRow, 0}));
  EXPECT_EQ(specs.at("transformer.wte.weight").tp, (TpSplit{TpRole::kVocab, 0}));
  EXPECT_EQ(specs.at("transformer.wte.weight").param_class, ParamClass::kTied);
  EXPECT_EQ(specs.at("transformer.wpe.weight").tp, TpSplit{});
  EXPECT_EQ(specs.at("transformer.wpe.weight").param_class, ParamClass::kPosition);
  EXPECT_EQ(specs.at("transformer.ln_f.bias").param_class, ParamClass::kNorm);
}

TEST(TpSplits, KeepWholeKvGroupsOfMegatronTogether) {
  const Sizes sizes{"learned", "megatron_gpt", 6, 3, 4, 20, 15, 31, 1, false, true, true, kRope};
  std::map<std::string, ParameterSpec> specs;
  for (const ParameterSpec& spec : make_model(config_of(sizes), AttentionImpl::kSdpa)->parameters())
    specs[spec.name] = spec;
  const std::string attention = "decoder.layers.0.self_attention.";

  EXPECT_EQ(specs.at(attention + "linear_qkv.weight").shape, (Shape{48, 20}));
  EXPECT_EQ(specs.at(attention + "linear_qkv.weight").tp, (TpSplit{TpRole::kColumn, 0, 16}));
  EXPECT_EQ(specs.at(attention + "linear_qkv.bias").tp, (TpSplit{TpRole::kColumn, 0, 16}));
  EXPECT_EQ(specs.at(attention + "linear_proj.weight").tp, (TpSplit{TpRole::kRow, 1, 4}));
  EXPECT_EQ(specs.at(attention + "linear_proj.bias").param_class, ParamClass::kRowBias);
  EXPECT_EQ(specs.at("embedding.position_embeddings.weight").param_class, ParamClass::kPosition);
}

TEST(TpSplits, AreRightForHeadsAndBiases) {
  const Sizes sizes{"", "llama", 6, 3, 4, 20, 15, 31, 1, false, true, true, kRope};
  std::map<std::string, ParameterSpec> specs;
  for (const ParameterSpec& spec : make_model(config_of(sizes), AttentionImpl::kSdpa)->parameters())
    specs[spec.name] = spec;
  const std::string attention = "model.layers.0.self_attn.", mlp = "model.layers.0.mlp.";

  EXPECT_EQ(specs.at(attention + "k_proj.bias").tp,
            (TpSplit{TpRole::kColumn, 0, 4, {}, /*is_kv=*/true}));
  EXPECT_EQ(specs.at(attention + "q_proj.bias").tp, (TpSplit{TpRole::kColumn, 0, 4}));
  EXPECT_EQ(specs.at(attention + "o_proj.weight").tp, (TpSplit{TpRole::kRow, 1, 4}));
  EXPECT_EQ(specs.at(attention + "o_proj.bias").param_class, ParamClass::kRowBias);
  EXPECT_EQ(specs.at(mlp + "down_proj.bias").param_class, ParamClass::kRowBias);
  EXPECT_EQ(specs.at(mlp + "up_proj.bias").param_class, ParamClass::kBias);
  EXPECT_EQ(specs.at("lm_head.weight").tp, (TpSplit{TpRole::kVocab, 0}));
  const Sizes normed{"", "qwen3", 6, 3, 4, 20, 15, 31, 1, false, false, false, kRope};
  for (const ParameterSpec& spec :
       make_model(config_of(normed), AttentionImpl::kSdpa)->parameters()) {
    const bool is_head_norm =
        spec.name.ends_with("q_norm.weight") || spec.name.ends_with("k_norm.weight");
    EXPECT_EQ(spec.param_class == ParamClass::kQkNorm, is_head_norm) << spec.name;
    EXPECT_EQ(spec.tp.role == TpRole::kReplicated, spec.shape.size() == 1) << spec.name;
  }
}

}  // namespace
}  // namespace isoshard
