// SPDX-License-Identifier: Apache-2.0
// Which parameters AutoTP splits, and which degrees it refuses.
#include "parallel/tensor/autotp_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

#include "base/error.h"
#include "model/builtin.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::ThrowsMessage;

ParameterSpec spec_of(std::string name, Shape shape) {
  ParameterSpec spec;
  spec.name = std::move(name);
  spec.shape = std::move(shape);
  return spec;
}

TEST(AutotpPlan, SplitsByModuleName) {
  const std::array<ParameterSpec, 6> specs = {
      spec_of("model.embed_tokens.weight", {32, 8}),        spec_of("model.layers.0.self_attn.q_proj.weight", {8, 8}),
      spec_of("model.layers.0.self_attn.q_proj.bias", {8}), spec_of("model.layers.0.self_attn.o_proj.weight", {8, 8}),
      spec_of("model.layers.0.self_attn.o_proj.bias", {8}), spec_of("model.layers.0.input_layernorm.weight", {8})};

  const ShardPlan plan = autotp_plan(specs);

  const std::array<int, 6> expected_dims = {-1, 0, 0, 1, -1, -1};
  for (std::size_t i = 0; i < specs.size(); ++i) EXPECT_EQ(plan.sharded_dim(specs[i]), expected_dims[i]) << specs[i].name;
  EXPECT_EQ(plan.kind_of_module("model.layers.0.self_attn.o_proj"), ShardKind::kRow);
  EXPECT_EQ(plan.kind_of_module("lm_head"), ShardKind::kReplicated);
}

TEST(AutotpPlan, LayoutGivesEachRankItsEqualShare) {
  const ParameterSpec spec = spec_of("model.layers.0.mlp.down_proj.weight", {4, 6});
  const ShardPlan plan = autotp_plan(std::array{spec});
  const MeshShape mesh({{Axis::kDp, 1}, {Axis::kTp, 3}});

  const std::vector<Box> boxes = boxes_of(plan.layout_of(spec, 2), mesh, 2);

  ASSERT_EQ(boxes.size(), 1U);
  EXPECT_EQ(boxes[0].global_offset, (Shape{0, 4}));
  EXPECT_EQ(boxes[0].size, (Shape{4, 2}));
}

TEST(AutotpPlan, CopiesKvHeadsToNeighboursAboveTheirNumber) {
  ModelConfig config = builtin_config("tiny");
  config.num_heads = 8;
  config.num_kv_heads = 2;
  const auto model = make_model(config, AttentionImpl::kEager);

  const ShardPlan above = autotp_plan(*model, 4), at_number = autotp_plan(*model, 2);

  EXPECT_THAT(above.kv_head_of_rank, ElementsAre(0, 0, 1, 1));
  EXPECT_EQ(above.kind_of("model.layers.1.self_attn.v_proj.bias"), ShardKind::kKvReplica);
  EXPECT_EQ(above.kind_of("model.layers.1.self_attn.q_proj.bias"), ShardKind::kColumn);
  EXPECT_THAT(at_number.kv_head_of_rank, IsEmpty());
  EXPECT_EQ(at_number.kind_of("model.layers.1.self_attn.v_proj.bias"), ShardKind::kColumn);
}

TEST(AutotpPlan, RefusesDegreesThatDoNotDivideAndNamesAllNumbers) {
  ModelConfig config;
  config.num_heads = 6;
  config.num_kv_heads = 2;
  config.intermediate_size = 96;

  EXPECT_NO_THROW(check_autotp_degree(config, 2));
  EXPECT_THAT([&] { check_autotp_degree(config, 3); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("tp 3"), HasSubstr("2 kv heads"), Not(HasSubstr("ffn")))));
  EXPECT_THAT([&] { check_autotp_degree(config, 5); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("6 attention heads"), HasSubstr("2 kv heads"), HasSubstr("96 ffn features"))));
  EXPECT_THROW(check_autotp_degree(config, 0), UsageError);
}

TEST(AutotpPlan, AnArchitectureThatIsNotSplitYetIsRefusedByName) {
  for (const char* const model_type : {"qwen3", "gpt2"}) {
    ModelConfig config;
    config.model_type = model_type;
    config.num_heads = config.num_kv_heads = config.intermediate_size = 4;
    config.qk_norm = config.model_type == "qwen3";

    EXPECT_NO_THROW(check_autotp_degree(config, 1));
    EXPECT_THAT([&] { check_autotp_degree(config, 2); }, ThrowsMessage<UsageError>(HasSubstr(model_type)));
  }
}

}  // namespace
}  // namespace isoshard
