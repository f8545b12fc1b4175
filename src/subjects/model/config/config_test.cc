// SPDX-License-Identifier: Apache-2.0
// config.json: both layouts mean the same, what is missing, wrong or not built is refused by name.
#include "subjects/model/config/config.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/model.h"

namespace isoshard {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

/// As on the Hub (Qwen/Qwen2.5-0.5B, smaller numbers).
json hub_config() {
  return json::parse(
      R"({"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,)"
      R"( "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,)"
      R"( "intermediate_size": 176, "max_position_embeddings": 512,
    "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 4,)"
      R"( "num_hidden_layers": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,)"
      R"( "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,)"
      R"( "use_mrope": false,
    "use_sliding_window": false, "vocab_size": 256})");
}

/// The same, as transformers 5 saves it.
json new_config() {
  json config = hub_config();
  for (const char* const field : {"rope_theta", "torch_dtype", "architectures"})
    config.erase(field);
  config["rope_parameters"] = {{"rope_theta", 1e6}, {"rope_type", "default"}};
  config["dtype"] = "float32";
  config["layer_types"] = {"full_attention", "full_attention"};
  config["sliding_window"] = nullptr;
  return config;
}

std::string error_of(const json& config) {
  try {
    static_cast<void>(parse_model_config(config, "dir/config.json"));
  } catch (const FileError& error) {
    return error.what();
  }
  return "no FileError";
}

TEST(ModelConfigFile, EveryFieldArrives) {
  const ModelConfig config = parse_model_config(hub_config(), "config.json");

  EXPECT_EQ(config.model_type, "qwen2");
  EXPECT_EQ(config.vocab_size, 256);
  EXPECT_EQ(config.hidden_size, 64);
  EXPECT_EQ(config.intermediate_size, 176);
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(config.num_heads, 4);
  EXPECT_EQ(config.num_kv_heads, 2);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_EQ(config.max_positions, 512);
  EXPECT_EQ(config.norm_eps, 1e-6);
  EXPECT_EQ(config.initializer_range, 0.02);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_EQ(config.rope, (RopeConfig{"default", 1e6}));
}

TEST(ModelConfigFile, BothLayoutsMeanTheSame) {
  EXPECT_EQ(parse_model_config(hub_config(), "a"), parse_model_config(new_config(), "b"));
}

TEST(ModelConfigFile, WhatIsWrittenReadsBackEqual) {
  for (const std::string& name : builtin_names()) {
    const ModelConfig config = builtin_config(name);
    EXPECT_EQ(parse_model_config(to_json(config), "config.json"), config) << name;
  }
}

TEST(ModelConfigFile, AGivenHeadDimNeedNotBeTheQuotient) {
  json config = hub_config();
  config["head_dim"] = 32;

  EXPECT_EQ(parse_model_config(config, "config.json").head_dim, 32);
  EXPECT_EQ(parse_model_config(to_json(parse_model_config(config, "a")), "b").head_dim, 32);
}

class RequiredField : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Fields, RequiredField,
                         testing::Values("model_type", "vocab_size", "hidden_size",
                                         "intermediate_size", "num_hidden_layers",
                                         "num_attention_heads", "num_key_value_heads",
                                         "max_position_embeddings", "rms_norm_eps",
                                         "initializer_range", "tie_word_embeddings", "rope_theta",
                                         "hidden_act"),
                         [](const auto& tested) { return std::string(tested.param); });

TEST_P(RequiredField, IsNamedWhenItIsMissing) {
  json config = hub_config();
  config.erase(GetParam());

  EXPECT_THAT(error_of(config), AllOf(StartsWith("dir/config.json: "), HasSubstr(GetParam()),
                                      HasSubstr("is missing")));
}

TEST_P(RequiredField, IsNamedWhenItIsOfAWrongType) {
  for (const json& wrong : {json::array({1}), json::object()}) {
    json config = hub_config();
    config[GetParam()] = wrong;

    EXPECT_THAT(error_of(config), AllOf(StartsWith("dir/config.json: "), HasSubstr(GetParam()),
                                        HasSubstr("must be")));
  }
}

TEST_P(RequiredField, NullIsNoValue) {
  json config = hub_config();
  config[GetParam()] = nullptr;

  EXPECT_THAT(error_of(config), AllOf(StartsWith("dir/config.json: "), HasSubstr(GetParam())));
}

struct Refusal {
  const char* slug;
  json patch;  ///< merged into the Hub's layout
  std::vector<std::string> words;
};
void PrintTo(const Refusal& refusal, std::ostream* out) {
  *out << refusal.slug;
}

class RefusedConfig : public testing::TestWithParam<Refusal> {};
INSTANTIATE_TEST_SUITE_P(
    Fields, RefusedConfig,
    testing::Values(
        Refusal{"sliding_window",
                {{"use_sliding_window", true}},
                {"use_sliding_window must be false", "sliding windows are not built"}},
        Refusal{"layer_types",
                {{"layer_types", {"full_attention", "sliding_attention"}}},
                {"layer_types[1]", "sliding_attention"}},
        Refusal{"layer_types_count",
                {{"layer_types", {"full_attention"}}},
                {"layer_types", "each of the 2 layers, got 1"}},
        Refusal{"yarn",
                {{"rope_scaling", {{"type", "yarn"}, {"factor", 4.0}}}},
                {"rope_scaling.type must be", "'yarn'"}},
        Refusal{"rope_typo",
                {{"rope_scaling", {{"rope_type", "defualt"}}}},
                {"rope_type", "unknown rope type 'defualt'", "did you mean 'default'?"}},
        Refusal{"two_thetas",
                {{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e4}}}},
                {"rope_theta", "10000"}},
        Refusal{"partial_rotation",
                {{"rope_parameters",
                  {{"rope_type", "default"}, {"rope_theta", 1e6}, {"partial_rotary_factor", 0.5}}}},
                {"partial_rotary_factor"}},
        Refusal{"activation", {{"hidden_act", "gelu"}}, {"hidden_act must be silu", "'gelu'"}},
        Refusal{"longrope",
                {{"rope_scaling", {{"rope_type", "longrope"}}}},
                {"rope_scaling.rope_type", "must be default or llama3"}},
        Refusal{"llama3_without_factor",
                {{"rope_scaling", {{"rope_type", "llama3"}}}},
                {"rope_scaling.factor is missing"}},
        Refusal{"llama3_band",
                {{"rope_scaling",
                  {{"rope_type", "llama3"},
                   {"factor", 8.0},
                   {"low_freq_factor", 4.0},
                   {"high_freq_factor", 4.0},
                   {"original_max_position_embeddings", 64}}}},
                {"high_freq_factor must be above low_freq_factor 4", "got 4"}},
        Refusal{"two_scalings",
                {{"rope_scaling",
                  {{"rope_type", "llama3"},
                   {"factor", 8.0},
                   {"low_freq_factor", 1.0},
                   {"high_freq_factor", 4.0},
                   {"original_max_position_embeddings", 64}}},
                 {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e6}}}},
                {"rope_scaling and rope_parameters must agree"}},
        Refusal{"head_dim_of_qwen3",
                {{"model_type", "qwen3"}},
                {"head_dim is missing; qwen3 needs it"}},
        Refusal{"bias_no_bool",
                {{"model_type", "llama"}, {"attention_bias", 1}},
                {"attention_bias must be true or false, got 1"}},
        Refusal{"type_typo",
                {{"model_type", "qwem2"}},
                {"model_type 'qwem2' is unknown", "did you mean 'qwen2'?"}},
        Refusal{"kv_heads",
                {{"num_key_value_heads", 3}},
                {"num_attention_heads must be divisible by num_key_value_heads 3", "got 4"}},
        Refusal{"heads",
                {{"num_attention_heads", 6}},
                {"hidden_size must be divisible by num_attention_heads 6", "got 64"}},
        Refusal{"odd_head_dim", {{"head_dim", 15}}, {"head_dim must be even", "got 15"}},
        Refusal{"zero_layers", {{"num_hidden_layers", 0}}, {"num_hidden_layers must be", "got 0"}},
        Refusal{"negative_size", {{"hidden_size", -64}}, {"hidden_size must be", "got -64"}},
        Refusal{"fraction", {{"vocab_size", 256.0}}, {"vocab_size must be an integer, got 256.0"}},
        Refusal{"huge",
                {{"vocab_size", 18446744073709551615ULL}},
                {"vocab_size must be", "got 18446744073709551615"}},
        Refusal{"text_for_bool",
                {{"tie_word_embeddings", "true"}},
                {"tie_word_embeddings must be true or false, got \"true\""}},
        Refusal{
            "zero_eps", {{"rms_norm_eps", 0}}, {"rms_norm_eps must be a positive number, got 0"}},
        Refusal{"dropout",
                {{"attention_dropout", 1.0}},
                {"attention_dropout must be", "below 1, got 1"}},
        Refusal{"dtype", {{"torch_dtype", "floaty"}}, {"torch_dtype"}},
        Refusal{"quantized",
                {{"quantization_config", {{"bits", 4}}}},
                {"quantization_config", "not built"}}),
    [](const auto& tested) { return tested.param.slug; });

TEST_P(RefusedConfig, NamesFileFieldAndReason) {
  json config = hub_config();
  for (const auto& [field, value] : GetParam().patch.items()) config[field] = value;

  const std::string error = error_of(config);

  EXPECT_THAT(error, StartsWith("dir/config.json: "));
  for (const std::string& word : GetParam().words) EXPECT_THAT(error, HasSubstr(word));
}

TEST(ModelConfigFile, Llama3ScalingIsTheSameInBothLayouts) {
  json hub = hub_config(), saved = new_config();
  hub["model_type"] = saved["model_type"] = "llama";
  hub["rope_scaling"] = {{"rope_type", "llama3"},
                         {"factor", 32.0},
                         {"low_freq_factor", 1.0},
                         {"high_freq_factor", 4.0},
                         {"original_max_position_embeddings", 8192}};
  saved["rope_parameters"] = hub["rope_scaling"];
  saved["rope_parameters"]["rope_theta"] = 1e6;

  const ModelConfig config = parse_model_config(hub, "a");

  EXPECT_EQ(config.rope, (RopeConfig{"llama3", 1e6, 32.0, 1.0, 4.0, 8192}));
  EXPECT_EQ(parse_model_config(saved, "b"), config);
  EXPECT_EQ(parse_model_config(to_json(config), "c"), config);
}

TEST(ModelConfigFile, BiasesAreOffUnlessTheFileSaysOtherwise) {
  json llama = hub_config(), qwen3 = hub_config();
  llama["model_type"] = "llama";
  qwen3["model_type"] = "qwen3";
  qwen3["head_dim"] = 16;
  const auto biases = [](const json& file) {
    const ModelConfig config = parse_model_config(file, "config.json");
    EXPECT_EQ(parse_model_config(to_json(config), "b"), config);
    return std::array{config.qkv_bias, config.attention_out_bias, config.mlp_bias, config.qk_norm};
  };

  EXPECT_EQ(biases(hub_config()), (std::array{true, false, false, false}));
  EXPECT_EQ(biases(llama), (std::array{false, false, false, false}));
  EXPECT_EQ(biases(qwen3), (std::array{false, false, false, true}));
  llama["mlp_bias"] = true;
  EXPECT_EQ(biases(llama), (std::array{false, false, true, false}));
  llama["attention_bias"] = qwen3["attention_bias"] = true;
  EXPECT_EQ(biases(llama), (std::array{true, true, true, false}));
  EXPECT_EQ(biases(qwen3), (std::array{true, true, false, true}));
}

/// As on the Hub (gpt2, smaller numbers).
json gpt2_file() {
  return json::parse(R"({"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],)"
                     R"( "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.2, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,)"
                     R"( "model_type": "gpt2", "n_ctx": 1024, "n_embd": 60,
    "n_head": 5, "n_layer": 2, "n_positions": 128, "resid_pdrop": 0.3,)"
                     R"( "summary_type": "cls_index", "vocab_size": 257})");
}

TEST(Gpt2ConfigFile, EveryFieldArrives) {
  const ModelConfig config = parse_model_config(gpt2_file(), "config.json");

  EXPECT_EQ(config.hidden_size, 60);
  EXPECT_EQ(config.num_heads, 5);
  EXPECT_EQ(config.num_kv_heads, 5);
  EXPECT_EQ(config.head_dim, 12);
  EXPECT_EQ(config.num_layers, 2);
  EXPECT_EQ(config.intermediate_size, 240);
  EXPECT_EQ(config.max_positions, 128);
  EXPECT_EQ(config.norm_eps, 1e-5);
  EXPECT_EQ(config.vocab_size, 257);
  EXPECT_TRUE(config.tie_word_embeddings) << "transformers ties where the file says nothing";
  EXPECT_EQ(config.attention_dropout, 0.1);
  EXPECT_EQ(config.embedding_dropout, 0.2);
  EXPECT_EQ(config.residual_dropout, 0.3);
  EXPECT_EQ(parse_model_config(to_json(config), "b"), config);
}

TEST(Gpt2ConfigFile, WhatTheForwardPassDoesNotDoIsRefusedByName) {
  for (const auto& [field, value] :
       std::map<std::string, json>{{"resid_pdrop", 1},
                                   {"embd_pdrop", -0.1},
                                   {"attn_pdrop", 1.5},
                                   {"activation_function", "gelu"},
                                   {"scale_attn_weights", false},
                                   {"scale_attn_by_inverse_layer_idx", true},
                                   {"reorder_and_upcast_attn", true},
                                   {"add_cross_attention", true},
                                   {"n_head", 7},
                                   {"n_layer", 0},
                                   {"torch_dtype", "int8"}}) {
    json file = gpt2_file();
    file[field] = value;

    EXPECT_THAT(error_of(file), AllOf(StartsWith("dir/config.json: "), HasSubstr(field))) << field;
  }
}

TEST(ModelConfigFile, AWindowWithoutASwitchIsInUse) {
  json config = hub_config();
  config.erase("use_sliding_window");

  EXPECT_THAT(error_of(config), HasSubstr("sliding_window must not be set"));
}

TEST(ModelConfigFile, AnythingButAnObjectIsRefused) {
  EXPECT_THAT(error_of(json::array()), HasSubstr("must be a JSON object"));
  EXPECT_THAT(error_of(json("no \xff text")), HasSubstr("got \"no \ufffd text\""));
}

TEST(AttentionNames, ParseWhatTheyAreCalledAndRefuseTheRest) {
  EXPECT_EQ(parse_attention_impl(name_of(AttentionImpl::kEager)), AttentionImpl::kEager);
  EXPECT_EQ(parse_attention_impl(name_of(AttentionImpl::kSdpa)), AttentionImpl::kSdpa);
  for (const auto& [wrong, word] : std::map<std::string, std::string>{
           {"flash_attention_2", "no CPU kernel"}, {"spda", "'sdpa'?"}}) {
    try {
      static_cast<void>(parse_attention_impl(wrong));
      ADD_FAILURE() << wrong << " was taken";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr(word));
    }
  }
}

TEST(BuiltinConfigs, HaveTheSizesOfTheirModels) {
  const ModelConfig small = builtin_config("small"), qwen = builtin_config("qwen/qwen2.5-0.5b");

  EXPECT_EQ(small.head_dim, 16);
  EXPECT_FALSE(small.tie_word_embeddings);
  EXPECT_EQ(qwen.hidden_size, 896);
  EXPECT_EQ(qwen.head_dim, 64);
  EXPECT_TRUE(qwen.tie_word_embeddings);
}

TEST(BuiltinConfigs, ComeBackFromTheirJson) {
  for (const std::string& name : builtin_names()) {
    const ModelConfig config = builtin_config(name);

    EXPECT_EQ(parse_model_config(to_json(config), name), config) << name;
    EXPECT_FALSE(make_model(config, AttentionImpl::kEager)->parameters().empty()) << name;
  }
}

TEST(LatticeConfigFile, HasRowsThatHoldTheirEntries) {
  json config = to_json(builtin_config("lattice"));  // rows of 16 and 24 entries
  config["row_nonzeros"] = 16;
  EXPECT_EQ(error_of(config), "no FileError");

  config["row_nonzeros"] = 17;

  EXPECT_THAT(error_of(config), HasSubstr("row_nonzeros must be at most 16"));
}

TEST(MegatronConfigFile, ReadsMegatronsOwnFieldNames) {
  const nlohmann::json fields = {{"model_type", "megatron_gpt"},
                                 {"vocab_size", 64},
                                 {"hidden_size", 48},
                                 {"num_layers", 3},
                                 {"num_attention_heads", 6},
                                 {"num_query_groups", 2},
                                 {"max_position_embeddings", 32},
                                 {"position_embedding_type", "rope"},
                                 {"rotary_base", 500.0},
                                 {"layernorm_epsilon", 1e-5},
                                 {"init_method_std", 0.02},
                                 {"share_embeddings_and_output_weights", true},
                                 {"add_bias_linear", false},
                                 {"add_qkv_bias", true}};
  const ModelConfig config = parse_model_config(fields, "c.json");

  EXPECT_EQ(config.intermediate_size, 192);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.num_kv_heads, 2);
  EXPECT_EQ(config.rope.theta, 500.0);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_FALSE(config.mlp_bias);
  for (const auto& [field, value] :
       std::vector<std::pair<const char*, nlohmann::json>>{{"position_embedding_type", "alibi"},
                                                           {"normalization", "RMSNorm"},
                                                           {"activation", "swiglu"},
                                                           {"hidden_dropout", 1},
                                                           {"num_query_groups", 4}}) {
    nlohmann::json wrong = fields;
    wrong[field] = value;
    EXPECT_THROW(static_cast<void>(parse_model_config(wrong, "c.json")), FileError) << field;
  }
}

struct Published {
  const char *name, *model_type;
  std::int64_t parameters;  ///< as counted on the Hub
};

TEST(BuiltinConfigs, HaveAsManyParametersAsPublished) {
  for (const Published& published : {Published{"Qwen/Qwen2.5-0.5B", "qwen2", 494032768},
                                     Published{"Qwen/Qwen2.5-1.5B", "qwen2", 1543714304},
                                     Published{"Qwen/Qwen2.5-7B", "qwen2", 7615616512},
                                     Published{"Qwen/Qwen3-0.6B", "qwen3", 596049920},
                                     Published{"Qwen/Qwen3-32B", "qwen3", 32762123264},
                                     Published{"meta-llama/Llama-3-8B", "llama", 8030261248},
                                     Published{"meta-llama/Llama-3.2-1B", "llama", 1235814400},
                                     Published{"gpt2", "gpt2", 124439808}}) {
    const ModelConfig config = builtin_config(published.name);

    std::int64_t count = 0;
    for (const ParameterSpec& spec : make_model(config, AttentionImpl::kSdpa)->parameters()) {
      std::int64_t size = 1;
      for (const std::int64_t dim : spec.shape) size *= dim;
      count += size;
    }

    EXPECT_EQ(config.model_type, published.model_type);
    EXPECT_EQ(count, published.parameters) << published.name;
  }
}

TEST(BuiltinConfigs, AnUnknownNameGetsASuggestion) {
  try {
    static_cast<void>(builtin_config("smal"));
    FAIL() << "smal was taken";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("'smal'"), HasSubstr("did you mean 'small'?")));
  }
}

}  // namespace
}  // namespace isoshard
