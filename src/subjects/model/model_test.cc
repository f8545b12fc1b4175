// SPDX-License-Identifier: Apache-2.0
// The whole model: names, shapes, taps, causality, and heads
// read off the shapes a strategy returns.
#include "subjects/model/model.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/weights.h"
#include "subjects/model/zoo/blocks.h"
#include "subjects/model/zoo/registry.h"

namespace isoshard {
namespace {

using testing::ElementsAreArray;

/// tiny with grouped kv heads, so that query and kv heads cannot be mixed up.
ModelConfig grouped_config() {
  ModelConfig config = builtin_config("tiny");
  config.num_kv_heads = 2;
  return config;
}

Parameters parameters_of(const Model& model, at::ScalarType dtype, bool requires_grad = false) {
  const InitialWeights weights(11, 0.2, /*generic=*/true);
  Parameters parameters;
  for (const ParameterSpec& spec : model.parameters()) {
    parameters.emplace(spec.name, weights.read(spec, Shape(spec.shape.size(), 0), spec.shape)
                                      .to(dtype)
                                      .requires_grad_(requires_grad));
  }
  return parameters;
}

at::Tensor ids_of(std::int64_t batch, std::int64_t length) {
  return (at::arange(batch * length, at::kLong) * 37 % 96).view({batch, length});
}

/// Remembers what passes and may change one activation, not linearly: norms and softmax undo scales
/// and shifts.
class Recorder final : public Sink {
 public:
  void begin_step(int /*step*/) override {}
  [[nodiscard]] at::Tensor on_activation(const Site& site, at::Tensor value) override {
    names.push_back(site.name);
    sites.insert_or_assign(site.name, site);
    values.insert_or_assign(site.name, value.detach());
    return site.name == changed ? value.sin() : value;
  }
  [[nodiscard]] at::Tensor on_activation_grad(const Site& site, at::Tensor gradient) override {
    gradients.insert_or_assign(site.name, gradient);
    return gradient;
  }
  void on_record(const Site& /*site*/, const at::Tensor& /*value*/) override {}

  std::vector<std::string> names;
  std::map<std::string, Site> sites;
  Parameters values, gradients;
  std::string changed;
};

std::vector<std::string> expected_taps(std::int64_t layers) {
  std::vector<std::string> names{"model.embed_tokens"};
  for (std::int64_t i = 0; i < layers; ++i) {
    const std::string layer = fmt::format("model.layers.{}", i);
    for (const char* const point :
         {".input_layernorm", ".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj",
          ".self_attn.q_rope", ".self_attn.k_rope", ".self_attn.core", ".self_attn.o_proj",
          ".self_attn", ".post_attention_layernorm", ".mlp.gate_proj", ".mlp.up_proj", ".mlp.act",
          ".mlp.down_proj", ".mlp", ""}) {
      names.push_back(layer + point);
    }
  }
  names.insert(names.end(), {"model.norm", "lm_head"});
  return names;
}

class EveryAttention : public testing::TestWithParam<AttentionImpl> {};
INSTANTIATE_TEST_SUITE_P(Impls, EveryAttention,
                         testing::Values(AttentionImpl::kEager, AttentionImpl::kSdpa),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

TEST(Qwen2Parameters, HaveTheNamesAndShapesOfTransformersInItsOrder) {
  const std::vector<ParameterSpec> specs =
      make_model(grouped_config(), AttentionImpl::kEager)->parameters();

  ASSERT_EQ(specs.size(), 1U + 2 * 12 + 1 + 1);
  EXPECT_EQ(specs[0].name, "model.embed_tokens.weight");
  EXPECT_EQ(specs[0].shape, (Shape{96, 48}));
  EXPECT_EQ(specs[1].name, "model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(specs[3].name, "model.layers.0.self_attn.k_proj.weight");
  EXPECT_EQ(specs[3].shape, (Shape{16, 48}));
  EXPECT_EQ(specs[4].param_class, ParamClass::kBias);
  EXPECT_EQ(specs[7].name, "model.layers.0.self_attn.o_proj.weight");
  EXPECT_EQ(specs[10].name, "model.layers.0.mlp.down_proj.weight");
  EXPECT_EQ(specs[10].shape, (Shape{48, 96}));
  EXPECT_EQ(specs[12].name, "model.layers.0.post_attention_layernorm.weight");
  EXPECT_EQ(specs[12].init, ParamInit::kOnes);
  EXPECT_EQ(specs.back().name, "lm_head.weight");
}

TEST(Qwen2Parameters, ATiedHeadHasNone) {
  ModelConfig config = grouped_config();
  config.tie_word_embeddings = true;
  const auto model = make_model(config, AttentionImpl::kEager);

  const Parameters parameters = parameters_of(*model, at::kDouble);

  EXPECT_FALSE(parameters.contains("lm_head.weight"));
  EXPECT_EQ(model->parameters()[0].param_class, ParamClass::kTied);
  Recorder recorder;
  const at::Tensor logits = model->forward(ids_of(1, 4), parameters, Strategy(), &recorder);
  EXPECT_TRUE(at::equal(logits, at::linear(recorder.values.at("model.norm"),
                                           parameters.at("model.embed_tokens.weight"))));
}

TEST(ModelRegistry, RefusesAnUnknownType) {
  ModelConfig config = grouped_config();
  config.model_type = "qwen1";

  EXPECT_THROW(static_cast<void>(make_model(config, AttentionImpl::kEager)), UsageError);
  EXPECT_THAT(model_types(), testing::Contains("qwen2"));
}

TEST_P(EveryAttention, LogitsHaveTheParametersDtypeForAnyBatchAndLength) {
  const auto model = make_model(grouped_config(), GetParam());
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    const Parameters parameters = parameters_of(*model, dtype);
    for (const auto& [batch, length] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1}, {2, 7}, {3, 24}}) {
      const at::Tensor logits =
          model->forward(ids_of(batch, length), parameters, Strategy(), nullptr);

      EXPECT_EQ(logits.sizes(), at::IntArrayRef({batch, length, 96}));
      EXPECT_EQ(logits.scalar_type(), dtype);
      EXPECT_TRUE(logits.isfinite().all().item<bool>());
    }
  }
}

TEST_P(EveryAttention, EveryPointIsTappedOnceInOrderOfExecution) {
  const auto model = make_model(grouped_config(), GetParam());
  Recorder recorder;

  static_cast<void>(
      model->forward(ids_of(2, 5), parameters_of(*model, at::kFloat), Strategy(), &recorder));

  EXPECT_THAT(recorder.names, ElementsAreArray(expected_taps(2)));
  EXPECT_EQ(recorder.values.at("model.layers.0.self_attn.q_rope").sizes(),
            at::IntArrayRef({2, 6, 5, 8}));
  EXPECT_EQ(recorder.values.at("model.layers.0.self_attn.k_rope").sizes(),
            at::IntArrayRef({2, 2, 5, 8}));
  EXPECT_EQ(recorder.values.at("model.layers.1.self_attn.core").sizes(),
            at::IntArrayRef({2, 5, 48}));
  EXPECT_EQ(recorder.values.at("model.layers.1.mlp.act").sizes(), at::IntArrayRef({2, 5, 96}));
}

TEST_P(EveryAttention, Qwen3TapsItsHeadNormsBetweenProjectionAndRotation) {
  ModelConfig config = grouped_config();
  config.model_type = "qwen3";
  config.qkv_bias = false;
  config.qk_norm = true;
  const auto model = make_model(config, GetParam());
  Recorder recorder;

  static_cast<void>(
      model->forward(ids_of(2, 5), parameters_of(*model, at::kFloat), Strategy(), &recorder));

  const std::string attention = "model.layers.0.self_attn.";
  EXPECT_THAT(std::vector(recorder.names.begin() + 2, recorder.names.begin() + 9),
              ElementsAreArray({attention + "q_proj", attention + "q_norm", attention + "k_proj",
                                attention + "k_norm", attention + "v_proj", attention + "q_rope",
                                attention + "k_rope"}));
  EXPECT_EQ(recorder.values.at(attention + "k_norm").sizes(), at::IntArrayRef({2, 5, 2, 8}));
}

TEST_P(EveryAttention, Gpt2TapsTheFusedProjectionInItsParts) {
  ModelConfig config = builtin_config("gpt2");
  config.vocab_size = 96;
  config.num_layers = 2;
  config.hidden_size = config.intermediate_size = 36;
  config.num_heads = config.num_kv_heads = 3;
  config.head_dim = 12;
  const auto model = make_model(config, GetParam());
  Recorder recorder;

  static_cast<void>(
      model->forward(ids_of(2, 5), parameters_of(*model, at::kFloat), Strategy(), &recorder));

  std::vector<std::string> names{"transformer.wte", "transformer.drop"};
  for (const std::string layer : {"transformer.h.0", "transformer.h.1"}) {
    for (const char* const point :
         {".ln_1", ".attn.c_attn.q", ".attn.c_attn.k", ".attn.c_attn.v", ".attn.core",
          ".attn.c_proj", ".attn", ".ln_2", ".mlp.c_fc", ".mlp.act", ".mlp.c_proj", ".mlp", ""}) {
      names.push_back(layer + point);
    }
  }
  names.insert(names.end(), {"transformer.ln_f", "lm_head"});
  EXPECT_THAT(recorder.names, ElementsAreArray(names));
  EXPECT_THAT(model->hidden_state_points(),
              testing::ElementsAre("transformer.drop", "transformer.h.0", "transformer.ln_f"));
}

TEST_P(EveryAttention, TappingDoesNotChangeABit) {
  const auto model = make_model(grouped_config(), GetParam());
  const Parameters parameters = parameters_of(*model, at::kBFloat16);
  Recorder recorder;

  const at::Tensor with = model->forward(ids_of(2, 5), parameters, Strategy(), &recorder);

  EXPECT_TRUE(at::equal(with, model->forward(ids_of(2, 5), parameters, Strategy(), nullptr)));
}

TEST_P(EveryAttention, EveryTapCanChangeWhatFollows) {
  const auto model = make_model(grouped_config(), GetParam());
  const Parameters parameters = parameters_of(*model, at::kFloat);
  const at::Tensor plain = model->forward(ids_of(2, 5), parameters, Strategy(), nullptr);
  for (const std::string& name : expected_taps(2)) {
    Recorder recorder;
    recorder.changed = name;

    EXPECT_FALSE(at::equal(model->forward(ids_of(2, 5), parameters, Strategy(), &recorder), plain))
        << name;
  }
}

TEST_P(EveryAttention, GradientsOfTapsAreThoseOfTheParametersBehindThem) {
  const auto model = make_model(grouped_config(), GetParam());
  const Parameters parameters = parameters_of(*model, at::kDouble, /*requires_grad=*/true);
  Recorder recorder;

  model->forward(ids_of(2, 5), parameters, Strategy(), &recorder).square().mean().backward();

  EXPECT_EQ(recorder.gradients.size(), expected_taps(2).size());
  const auto check = [&](const std::string& module, const std::string& input) {
    const at::Tensor expected = at::matmul(recorder.gradients.at(module).flatten(0, 1).t(),
                                           recorder.values.at(input).flatten(0, 1));
    EXPECT_TRUE(at::allclose(parameters.at(module + ".weight").grad(), expected, 1e-10, 1e-14))
        << module;
  };
  check("lm_head", "model.norm");
  check("model.layers.1.mlp.down_proj", "model.layers.1.mlp.act");
  check("model.layers.1.mlp.gate_proj", "model.layers.1.post_attention_layernorm");
  check("model.layers.0.self_attn.o_proj", "model.layers.0.self_attn.core");
  check("model.layers.0.self_attn.q_proj", "model.layers.0.input_layernorm");
  EXPECT_TRUE(at::allclose(
      parameters.at("model.layers.0.self_attn.k_proj.bias").grad(),
      recorder.gradients.at("model.layers.0.self_attn.k_proj").flatten(0, 1).sum(0), 1e-10, 1e-14));
}

TEST_P(EveryAttention, ALaterTokenChangesNothingBefore) {
  const auto model = make_model(grouped_config(), GetParam());
  const Parameters parameters = parameters_of(*model, at::kDouble);
  const at::Tensor ids = ids_of(1, 8), changed = ids.clone();
  changed[0][5].fill_(95);

  const at::Tensor before = model->forward(ids, parameters, Strategy(), nullptr),
                   after = model->forward(changed, parameters, Strategy(), nullptr);

  EXPECT_TRUE(at::equal(before.slice(1, 0, 5), after.slice(1, 0, 5)));
  EXPECT_FALSE(at::equal(before.slice(1, 5, 6), after.slice(1, 5, 6)));
}

TEST(AttentionImpls, AgreeWithinRoundingInEveryDtype) {
  for (const auto& [dtype, bound] : std::map<at::ScalarType, double>{
           {at::kDouble, 1e-13}, {at::kFloat, 1e-5}, {at::kBFloat16, 5e-2}, {at::kHalf, 5e-3}}) {
    const auto eager = make_model(grouped_config(), AttentionImpl::kEager),
               sdpa = make_model(grouped_config(), AttentionImpl::kSdpa);
    const Parameters parameters = parameters_of(*eager, dtype);

    const at::Tensor a =
        eager->forward(ids_of(2, 24), parameters, Strategy(), nullptr).to(at::kDouble);
    const at::Tensor b =
        sdpa->forward(ids_of(2, 24), parameters, Strategy(), nullptr).to(at::kDouble);

    EXPECT_LE(((a - b).norm() / a.norm()).item<double>(), bound) << at::toString(dtype);
  }
}

/// Column-parallel q, k, v, gate and up over tp 2: only says so; the parameters are already this
/// rank's.
class HalfStrategy final : public Strategy {
 public:
  HalfStrategy() : Strategy(/*dp_degree=*/3, /*activation_grad_scale=*/3.0) {}
  [[nodiscard]] bool splits_output(std::string_view module) const override {
    return module.ends_with("q_proj") || module.ends_with("k_proj") || module.ends_with("v_proj") ||
           module.ends_with("gate_proj") || module.ends_with("up_proj");
  }
  [[nodiscard]] int tp_degree() const noexcept override { return 2; }
};

TEST(SplitHeads, TwoHalvesOfTheHeadsAddUpToTheWhole) {
  const ModelConfig config = grouped_config();
  const auto model = make_model(config, AttentionImpl::kEager);
  const Parameters whole = parameters_of(*model, at::kDouble);
  const std::string module = "model.layers.0.self_attn";
  const at::Tensor x = at::linspace(-1, 1, 2 * 5 * 48, at::kDouble).view({2, 5, 48}).sin();
  const RotaryTables tables = rotary_tables(config.rope, config.head_dim, 5, at::kDouble);
  const auto attention = [&](const Parameters& parameters, const Strategy& strategy, Sink* sink) {
    return self_attention(ForwardPass(parameters, strategy, sink), config, AttentionImpl::kEager,
                          module, x, tables);
  };

  at::Tensor sum = at::zeros_like(x);
  for (int half = 0; half < 2; ++half) {
    Parameters local;
    for (const char* const name : {".q_proj", ".k_proj", ".v_proj"}) {
      local[module + name + ".weight"] = whole.at(module + name + ".weight").chunk(2, 0)[half];
      local[module + name + ".bias"] = whole.at(module + name + ".bias").chunk(2, 0)[half];
    }
    local[module + ".o_proj.weight"] = whole.at(module + ".o_proj.weight").chunk(2, 1)[half];
    Recorder recorder;
    sum += attention(local, HalfStrategy(), &recorder);

    EXPECT_EQ(recorder.values.at(module + ".q_rope").size(1), 3);
    EXPECT_EQ(recorder.sites.at(module + ".q_rope").layout.global_shape, (Shape{6, 6, 5, 8}));
    EXPECT_EQ(recorder.sites.at(module + ".k_rope").layout.placements,
              (std::vector{shard(Axis::kDp, 0), shard(Axis::kTp, 1)}));
    EXPECT_EQ(recorder.sites.at(module + ".core").layout.global_shape, (Shape{6, 5, 48}));
    EXPECT_EQ(recorder.sites.at(module + ".core").layout.placements,
              (std::vector{shard(Axis::kDp, 0), shard(Axis::kTp, 2)}));
    EXPECT_EQ(recorder.sites.at(module).layout.placements, (std::vector{shard(Axis::kDp, 0)}));
  }

  EXPECT_TRUE(at::allclose(sum, attention(whole, Strategy(), nullptr), 1e-12, 1e-14));
}

TEST(SplitHeads, AShardThatCutsAHeadIsRefused) {
  const ModelConfig config = grouped_config();
  const auto model = make_model(config, AttentionImpl::kEager);
  Parameters parameters = parameters_of(*model, at::kFloat);
  for (const char* const kind : {".weight", ".bias"}) {
    at::Tensor& tensor = parameters.at(std::string("model.layers.0.self_attn.q_proj") + kind);
    tensor = tensor.slice(0, 0, 12);
  }

  EXPECT_THROW(static_cast<void>(model->forward(ids_of(1, 3), parameters, Strategy(), nullptr)),
               ShapeError);
}

TEST(TiedWords, OfMegatronAreOneParameterOfTheirOwnClass) {
  for (const bool is_tied : {true, false}) {
    ModelConfig config = builtin_config("tiny-megatron_gpt");
    config.tie_word_embeddings = is_tied;
    const auto model = make_model(config, AttentionImpl::kEager);

    int of_words = 0;
    for (const ParameterSpec& spec : model->parameters()) {
      const bool is_of_words = spec.name == "embedding.word_embeddings.weight";
      if (is_of_words) ++of_words;
      const ParamClass of_words_class = is_tied ? ParamClass::kTied : ParamClass::kEmbedding;
      EXPECT_EQ(spec.param_class == of_words_class, is_of_words) << spec.name;
    }
    EXPECT_EQ(of_words, 1);
  }
}

TEST(ModelArguments, AreRefusedByName) {
  const auto model = make_model(grouped_config(), AttentionImpl::kEager);
  Parameters parameters = parameters_of(*model, at::kFloat);
  const auto forward = [&](const at::Tensor& ids) {
    static_cast<void>(model->forward(ids, parameters, Strategy(), nullptr));
  };

  EXPECT_THROW(forward(at::zeros({2, 3})), ShapeError);
  EXPECT_THROW(forward(at::zeros({3}, at::kLong)), ShapeError);
  EXPECT_THROW(forward(at::zeros({1, 513}, at::kLong)), ShapeError);
  parameters.erase("model.layers.1.mlp.up_proj.weight");
  try {
    forward(ids_of(1, 3));
    FAIL() << "ran without a weight";
  } catch (const ShapeError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("model.layers.1.mlp.up_proj.weight"));
  }
}

TEST(ActivationLayout, MultipliesTheSplitDimsByTheirDegrees) {
  const at::Tensor x = at::zeros({2, 5, 8});

  EXPECT_EQ(Strategy().activation_layout(x, 2), replicated({2, 5, 8}));
  EXPECT_EQ(Strategy(3).activation_layout(x, -1).global_shape, (Shape{6, 5, 8}));
  EXPECT_EQ(HalfStrategy().activation_layout(x, 2).global_shape, (Shape{6, 5, 16}));
  EXPECT_EQ(HalfStrategy().activation_layout(x, -1).placements, (std::vector{shard(Axis::kDp, 0)}));
  EXPECT_THROW(static_cast<void>(HalfStrategy().activation_layout(x, 3)), MeshError);
}

}  // namespace
}  // namespace isoshard
