// SPDX-License-Identifier: Apache-2.0
// Layers by stage, and which stage reads what.
#include "subjects/parallel/nd/stages.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/base/error.h"

namespace isoshard {
namespace {

TEST(Stages, GetLayersInOrderTheFirstOnesOneMore) {
  const std::vector<ModelSection> stages = stages_of(7, 3);

  ASSERT_EQ(stages.size(), 3U);
  EXPECT_EQ(stages[0], (ModelSection{0, 3, true, false}));
  EXPECT_EQ(stages[1], (ModelSection{3, 5, false, false}));
  EXPECT_EQ(stages[2], (ModelSection{5, 7, false, true}));
}

TEST(Stages, OfWhichThereAreMoreThanLayersAreRefused) {
  EXPECT_THROW((void)stages_of(2, 3), UsageError);
  EXPECT_THROW((void)stages_of(2, 0), UsageError);
}

TEST(Stages, ReadTheirLayersAndTheEnds) {
  const std::vector<ModelSection> stages = stages_of(12, 2);
  const auto readers = [&](std::string name, ParamClass param_class) {
    ParameterSpec spec;
    spec.name = std::move(name);
    spec.param_class = param_class;
    std::vector<int> result;
    for (int stage = 0; stage < 2; ++stage) {
      if (reads(stages[static_cast<std::size_t>(stage)], spec)) result.push_back(stage);
    }
    return result;
  };

  EXPECT_EQ(readers("model.embed_tokens.weight", ParamClass::kEmbedding), std::vector<int>{0});
  EXPECT_EQ(readers("model.layers.1.mlp.up_proj.weight", ParamClass::kMatrix), std::vector<int>{0});
  EXPECT_EQ(readers("model.layers.10.mlp.up_proj.weight", ParamClass::kMatrix),
            std::vector<int>{1});
  EXPECT_EQ(readers("model.norm.weight", ParamClass::kNorm), std::vector<int>{1});
  EXPECT_EQ(readers("wte.weight", ParamClass::kTied), (std::vector<int>{0, 1}));
}

}  // namespace
}  // namespace isoshard
