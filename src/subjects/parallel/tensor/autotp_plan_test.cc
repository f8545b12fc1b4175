// SPDX-License-Identifier: Apache-2.0
// Which parameters AutoTP splits, where their shards lie, and which degrees it refuses.
#include "subjects/parallel/tensor/autotp_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "core/base/error.h"
#include "subjects/model/config/builtin.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::ThrowsMessage;

std::unique_ptr<Model> model_of(const ModelConfig& config) {
  return make_model(config, AttentionImpl::kEager);
}

std::map<std::string, ParameterSpec> specs_of(const Model& model) {
  std::map<std::string, ParameterSpec> specs;
  for (const ParameterSpec& spec : model.parameters()) specs[spec.name] = spec;
  return specs;
}

std::map<std::string, int> sharded_dims(const Model& model, int tp, const std::string& below) {
  const ShardPlan plan = autotp_plan(model, tp);
  std::map<std::string, int> dims;
  for (const ParameterSpec& spec : model.parameters()) {
    if (spec.name.starts_with(below)) dims[spec.name.substr(below.size())] = plan.sharded_dim(spec);
  }
  return dims;
}

TEST(AutotpPlan, FollowsTheSplitsOfARotaryDecoder) {
  ModelConfig config = builtin_config("tiny-qwen3");
  config.qkv_bias = config.attention_out_bias = config.mlp_bias = true;
  const auto model = model_of(config);

  const std::map<std::string, int> expected = {
      {"self_attn.q_proj.weight", 0},  {"self_attn.q_proj.bias", 0},
      {"self_attn.k_proj.weight", 0},  {"self_attn.k_proj.bias", 0},
      {"self_attn.v_proj.weight", 0},  {"self_attn.v_proj.bias", 0},
      {"self_attn.o_proj.weight", 1},  {"self_attn.o_proj.bias", -1},
      {"self_attn.q_norm.weight", -1}, {"self_attn.k_norm.weight", -1},
      {"mlp.gate_proj.weight", 0},     {"mlp.gate_proj.bias", 0},
      {"mlp.up_proj.weight", 0},       {"mlp.up_proj.bias", 0},
      {"mlp.down_proj.weight", 1},     {"mlp.down_proj.bias", -1},
      {"input_layernorm.weight", -1},  {"post_attention_layernorm.weight", -1}};
  EXPECT_EQ(sharded_dims(*model, 3, "model.layers.1."), expected);
  const ShardPlan plan = autotp_plan(*model, 3);
  EXPECT_EQ(plan.kind_of_module("model.layers.0.self_attn.o_proj"), ShardKind::kRow);
  EXPECT_EQ(plan.kind_of_module("model.layers.0.mlp.up_proj"), ShardKind::kColumn);
}

TEST(AutotpPlan, FollowsTheTransposedSplitsOfGpt2) {
  const std::map<std::string, int> expected = {
      {"attn.c_attn.weight", 1}, {"attn.c_attn.bias", 0},  {"attn.c_proj.weight", 0},
      {"attn.c_proj.bias", -1},  {"ln_1.weight", -1},      {"ln_1.bias", -1},
      {"ln_2.weight", -1},       {"ln_2.bias", -1},        {"mlp.c_fc.weight", 1},
      {"mlp.c_fc.bias", 0},      {"mlp.c_proj.weight", 0}, {"mlp.c_proj.bias", -1}};
  EXPECT_EQ(sharded_dims(*model_of(builtin_config("tiny-gpt2")), 2, "transformer.h.0."), expected);
}

TEST(AutotpPlan, LayoutGivesEachRankItsEqualShare) {
  const auto model = model_of(builtin_config("tiny"));
  const ParameterSpec spec = specs_of(*model).at("model.layers.0.mlp.down_proj.weight");
  const MeshShape mesh({{Axis::kDp, 1}, {Axis::kTp, 3}});

  const std::vector<Box> boxes = boxes_of(autotp_plan(*model, 3).layout_of(spec, 2), mesh, 2);

  ASSERT_EQ(boxes.size(), 1U);
  EXPECT_EQ(boxes[0].global_offset, (Shape{0, 64}));
  EXPECT_EQ(boxes[0].size, (Shape{48, 32}));
}

TEST(AutotpPlan, CutsEachFusedSectionOnItsOwn) {
  const auto model = model_of(builtin_config("tiny-gpt2"));  // hidden 48
  const std::map<std::string, ParameterSpec> specs = specs_of(*model);
  const MeshShape mesh({{Axis::kTp, 3}});
  const ShardPlan plan = autotp_plan(*model, 3);

  const Layout weight = plan.layout_of(specs.at("transformer.h.0.attn.c_attn.weight"), 1);
  const Layout bias = plan.layout_of(specs.at("transformer.h.0.attn.c_attn.bias"), 1);

  EXPECT_THAT(boxes_of(weight, mesh, 1),
              ElementsAre(Box{{0, 0}, {0, 16}, {48, 16}}, Box{{0, 16}, {0, 64}, {48, 16}},
                          Box{{0, 32}, {0, 112}, {48, 16}}));
  EXPECT_THAT(boxes_of(bias, mesh, 1),
              ElementsAre(Box{{0}, {16}, {16}}, Box{{16}, {64}, {16}}, Box{{32}, {112}, {16}}));
}

TEST(AutotpPlan, ShardsOfEveryParameterTileIt) {
  for (const char* const name : {"tiny", "tiny-qwen3", "tiny-llama", "tiny-gpt2"}) {
    const auto model = model_of(builtin_config(name));
    for (const int tp : {1, 2, 3, 6}) {
      const ShardPlan plan = autotp_plan(*model, tp);
      const MeshShape mesh({{Axis::kTp, tp}});
      for (const ParameterSpec& spec : model->parameters()) {
        std::vector<Box> parts;
        for (int rank = 0; rank < tp; ++rank) {
          for (const Box& box : boxes_of(plan.layout_of(spec, rank), mesh, rank))
            parts.push_back(box);
        }
        EXPECT_EQ(tiling_problem(spec.shape, parts), "") << spec.name << " tp " << tp;
      }
    }
  }
}

TEST(AutotpPlan, CopiesKvHeadsToNeighborsAboveTheirNumber) {
  ModelConfig config = builtin_config("tiny");
  config.num_heads = 8;
  config.num_kv_heads = 2;
  const auto model = model_of(config);

  const ShardPlan above = autotp_plan(*model, 4), at_number = autotp_plan(*model, 2);

  EXPECT_THAT(above.kv_head_of_rank, ElementsAre(0, 0, 1, 1));
  EXPECT_EQ(above.kind_of("model.layers.1.self_attn.v_proj.bias"), ShardKind::kKvReplica);
  EXPECT_EQ(above.kind_of("model.layers.1.self_attn.q_proj.bias"), ShardKind::kColumn);
  EXPECT_THAT(at_number.kv_head_of_rank, IsEmpty());
  EXPECT_EQ(at_number.kind_of("model.layers.1.self_attn.v_proj.bias"), ShardKind::kColumn);
}

// 97 entries on 3 ranks: of 40 rows each, the last with 17 true ones; of 64 rows each, the last
// with none.
TEST(AutotpPlan, SplitsEmbeddingAndHeadWhenAskedAndPadsThemToEqualShards) {
  const MeshShape mesh({{Axis::kDp, 1}, {Axis::kTp, 3}});
  for (const char* const name : {"tiny", "tiny-gpt2", "tiny-megatron_gpt"}) {
    ModelConfig config = builtin_config(name);
    config.vocab_size = 97;
    config.tie_word_embeddings = false;
    const auto model = model_of(config);
    const auto rows_of = [&](std::int64_t multiple) {
      const ShardPlan plan = autotp_plan(*model, 3, multiple);
      std::vector<std::int64_t> rows = {plan.vocab_rows_per_rank};
      EXPECT_EQ(plan.kind_of_module(model->head_module()), ShardKind::kVocabHead) << name;
      for (const ParameterSpec& spec : model->parameters()) {
        if (spec.tp.role != TpRole::kVocab) continue;
        EXPECT_TRUE(is_vocab(plan.kind_of(spec.name))) << spec.name;
        for (int rank = 0; rank < 3; ++rank) {
          const std::vector<Box> boxes = boxes_of(plan.layout_of(spec, rank), mesh, rank);
          EXPECT_EQ(boxes.empty(), plan.vocab_shard(rank).count == 0);
          for (const Box& box : boxes)
            EXPECT_EQ(box.global_offset[0], plan.vocab_shard(rank).begin);
        }
      }
      for (int rank = 0; rank < 3; ++rank) rows.push_back(plan.vocab_shard(rank).count);
      return rows;
    };

    EXPECT_THAT(rows_of(1), ElementsAre(33, 33, 33, 31));
    EXPECT_THAT(rows_of(8), ElementsAre(40, 40, 40, 17));
    EXPECT_THAT(rows_of(64), ElementsAre(64, 64, 33, 0));
    EXPECT_EQ(autotp_plan(*model, 3).kind_of_module("lm_head"), ShardKind::kReplicated);
    EXPECT_THAT([&] { (void)autotp_plan(*model, 3, -8); },
                ThrowsMessage<UsageError>(HasSubstr("at least 1, got -8")));
  }
}

TEST(AutotpPlan, RefusesDegreesThatDoNotDivideAndNamesAllNumbers) {
  ModelConfig config = builtin_config("tiny");
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.intermediate_size = 96;
  const auto model = model_of(config);

  EXPECT_NO_THROW(check_autotp_degree(*model, 2));
  EXPECT_THAT([&] { check_autotp_degree(*model, 3); },
              ThrowsMessage<UsageError>(
                  AllOf(HasSubstr("tp 3"), HasSubstr("2 kv heads"), Not(HasSubstr("ffn")))));
  EXPECT_THAT(
      [&] { check_autotp_degree(*model, 5); },
      ThrowsMessage<UsageError>(AllOf(HasSubstr("6 attention heads"), HasSubstr("2 kv heads"),
                                      HasSubstr("96 ffn features"))));
  EXPECT_THROW(check_autotp_degree(*model, 0), UsageError);
}

}  // namespace
}  // namespace isoshard
