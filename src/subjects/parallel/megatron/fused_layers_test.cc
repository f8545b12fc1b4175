// SPDX-License-Identifier: Apache-2.0
// The table between Hugging Face's layers and Megatron's fused
// ones: every element lands exactly once, in Megatron's order.
#include "subjects/parallel/megatron/fused_layers.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "core/base/error.h"
#include "subjects/model/config/builtin.h"
#include "subjects/model/zoo/registry.h"
#include "subjects/parallel/megatron/megatron_plan.h"

namespace isoshard {
namespace {

using ::testing::ElementsAre;

struct Fused {
  std::vector<ParameterSpec> specs;
  std::vector<std::string> names;
  std::vector<Shape> shapes;
  std::vector<StoredParameter> stored;
};

Fused fused(std::string_view config_name, std::int64_t heads, std::int64_t kv_heads, int tp) {
  ModelConfig config = builtin_config(config_name);
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.head_dim = 8;
  config.qkv_bias = true;
  const auto model = make_model(config, AttentionImpl::kEager);
  const ShardPlan plan = megatron_plan(*model, tp);
  Fused result;
  result.specs = model->parameters();
  const MeshShape mesh({{Axis::kTp, tp}});
  for (const ParameterSpec& spec : result.specs) {
    result.names.push_back(spec.name);
    result.shapes.push_back(boxes_of(plan.layout_of(spec, 0), mesh, 0).at(0).size);
  }
  result.stored = stored_parameters(result.names, result.shapes, fused_layers(*model, plan));
  return result;
}

TEST(FusedLayers, EveryElementLandsExactlyOnceAndComesBack) {
  for (const auto& [heads, kv_heads, tp] :
       {std::tuple{6, 6, 2}, {6, 2, 1}, {8, 4, 2}, {6, 3, 3}, {8, 2, 4}, {6, 1, 2}}) {
    const Fused f = fused("tiny", heads, kv_heads, tp);
    std::set<std::size_t> seen;
    std::int64_t next = 0;
    for (const StoredParameter& stored : f.stored) {
      std::vector<std::int64_t> storage(static_cast<std::size_t>(numel_of(stored.shape)), -1);
      for (std::size_t p = 0; p < stored.parameters.size(); ++p) {
        ASSERT_TRUE(seen.insert(stored.parameters[p]).second);
        std::int64_t end = 0;
        for (const StoredRun& run : stored.runs[p]) {
          EXPECT_EQ(run.begin, end);
          end += run.count;
          for (std::int64_t i = 0; i < run.count; ++i) {
            std::int64_t& place = storage.at(static_cast<std::size_t>(run.stored + i));
            ASSERT_EQ(place, -1) << stored.name << " takes an element twice";
            place = next + run.begin + i;
          }
        }
        EXPECT_EQ(end, numel_of(f.shapes[stored.parameters[p]]));
        for (const StoredRun& run : stored.runs[p]) {
          for (std::int64_t i = 0; i < run.count; ++i)
            ASSERT_EQ(storage[static_cast<std::size_t>(run.stored + i)], next + run.begin + i);
        }
        next += end;
      }
      EXPECT_EQ(std::count(storage.begin(), storage.end(), -1), 0) << stored.name;
    }
    EXPECT_EQ(seen.size(), f.names.size());
  }
}

// tp 2 of 8 heads on 4 kv heads: a rank has 2 kv groups, each of 2 query heads, a key head and a
// value head.
TEST(FusedLayers, InterleaveQueriesKeysAndValuesByKvGroup) {
  const Fused f = fused("tiny", 8, 4, 2);
  const auto qkv = std::find_if(f.stored.begin(), f.stored.end(), [](const StoredParameter& s) {
    return s.name == "decoder.layers.1.self_attention.linear_qkv.bias";
  });
  ASSERT_NE(qkv, f.stored.end());

  EXPECT_EQ(qkv->shape, (Shape{64}));
  EXPECT_THAT(qkv->runs, ElementsAre(ElementsAre(StoredRun{0, 0, 16}, StoredRun{16, 32, 16}),
                                     ElementsAre(StoredRun{0, 16, 8}, StoredRun{8, 48, 8}),
                                     ElementsAre(StoredRun{0, 24, 8}, StoredRun{8, 56, 8})));
}

TEST(FusedLayers, HaveOneNameForEachStoredParameterAndKeepAllOthersApart) {
  const Fused f = fused("tiny-qwen3", 6, 2, 1);

  std::map<std::string, std::size_t> by_name;
  for (const std::string& name : f.names) ++by_name[megatron_name(name)];

  ASSERT_EQ(by_name.size(), f.stored.size());
  for (const StoredParameter& stored : f.stored) {
    const auto found = by_name.find(megatron_name(stored.name));
    ASSERT_NE(found, by_name.end()) << stored.name;
    EXPECT_EQ(found->second, stored.parameters.size()) << stored.name;
  }
  EXPECT_EQ(megatron_name("model.layers.0.post_attention_layernorm.weight"),
            "decoder.layers.0.pre_mlp_layernorm.weight");
  EXPECT_EQ(megatron_name("model.layers.0.self_attn.k_norm.weight"),
            "decoder.layers.0.self_attention.k_layernorm.weight");
}

TEST(FusedLayers, RefuseRowsThatDoNotFit) {
  const std::vector<std::string> names = {"a.gate_proj.weight", "a.up_proj.weight"};
  const std::vector<Shape> shapes = {{4, 2}, {5, 2}};
  const std::vector<FusedLayers> groups = {{{"a.gate_proj", "a.up_proj"}, 1, {4, 4}}};

  EXPECT_THROW((void)stored_parameters(names, shapes, groups), ShapeError);
}

}  // namespace
}  // namespace isoshard
