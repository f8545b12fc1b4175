// SPDX-License-Identifier: Apache-2.0
/// Claims about tables of several runs.
#include "harness/report/tables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "harness/report/json/verdict_json.h"
#include "harness/report/text/verdict_text.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

// seeds/000, model.layers.0: 7.81e-03 absolute and 1.77e-03 relative, so the norm of 100 elements
// is 4.41.
TEST(Tables, RelativeDifferenceIsThatOfPublishedTables) {
  std::vector<double> other(100, 0.441), values = other;
  values[7] += 7.81e-3;

  const Difference first = difference_of(other, values);

  EXPECT_EQ(first.numel, 100);
  EXPECT_NEAR(first.max_abs, 7.81e-3, 1e-12);
  EXPECT_NEAR(first.max_abs_by_norm(), 1.77e-3, 1e-5);
}

TEST(Tables, ANanIsNoSmallDifference) {
  const Difference d = difference_of(std::vector<double>{1, 2, 3}, std::vector<double>{1, NAN, 3});

  EXPECT_TRUE(std::isnan(d.max_abs));
  EXPECT_TRUE(std::isnan(d.max_abs_by_norm()));
}

TEST(Tables, GradientsAreComparedByTheirNorms) {
  const GradientComparison g = compare_gradient_norms({{"a", 1.0}, {"b", 2.0}, {"only.other", 9.0}},
                                                      {{"a", 1.5}, {"b", 1.9}, {"c", 3.0}});

  EXPECT_EQ(g.parameters, 2);
  EXPECT_DOUBLE_EQ(g.max_abs, 0.5);
  EXPECT_EQ(g.max_abs_name, "a");
  EXPECT_NEAR(g.mean_abs, 0.3, 1e-12);
  EXPECT_DOUBLE_EQ(g.max_relative, 0.5);
  EXPECT_EQ(g.max_relative_name, "a");
  EXPECT_NEAR(g.mean_relative, 0.275, 1e-12);
}

TEST(Tables, CountBitsThatTwoRunsHaveAlike) {
  TableColumn autotp, fsdp_tp;
  autotp.title = "autotp tp2";
  autotp.output_digests = fsdp_tp.output_digests = {{"a", 1}, {"b", 2}, {"c", 3}};
  autotp.gradient_digests = fsdp_tp.gradient_digests = {{"a", 4}, {"b", 5}};

  const SameBits equal = same_bits(autotp, fsdp_tp);
  EXPECT_EQ(equal.as, "autotp tp2");
  EXPECT_EQ(equal.outputs, 3);
  EXPECT_EQ(equal.outputs_of, 3);
  EXPECT_EQ(equal.output_gradients, 2);
  EXPECT_TRUE(equal.different.empty());

  fsdp_tp.output_digests["b"] = 7;
  fsdp_tp.gradient_digests["b"] = 8;
  fsdp_tp.gradient_digests.erase("a");
  const SameBits other = same_bits(autotp, fsdp_tp);
  EXPECT_EQ(other.outputs, 2);
  EXPECT_EQ(other.outputs_of, 3);
  EXPECT_EQ(other.output_gradients, 0);
  EXPECT_EQ(other.output_gradients_of, 1);
  EXPECT_EQ(other.different, std::vector<std::string>{"b"});
}

TEST(Tables, ListWhatEntersAndLeavesASplitInEveryArchitecture) {
  for (const char* name :
       {"model.embed_tokens", "model.layers.0", "model.layers.11.self_attn",
        "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp",
        "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj", "model.norm", "lm_head",
        "transformer.h.0.attn.c_attn.q", "transformer.h.0.mlp.c_fc",
        "decoder.layers.1.mlp.linear_fc1"}) {
    EXPECT_TRUE(is_listed_module(name)) << name;
  }
  for (const char* name : {"model.layers.0.input_layernorm", "transformer.h.0.ln_1",
                           "model.layers.0.self_attn.q_rope", "model.layers.0.self_attn.k_proj",
                           "model.layers.0.mlp.act", "model.layers.0.mlp.down_proj.partial"}) {
    EXPECT_FALSE(is_listed_module(name)) << name;
  }
}

ComparisonTables two_runs() {
  ComparisonTables tables;
  tables.title = "qwen2 bf16";
  tables.baseline = "ddp";
  for (int layer = 0; layer < 20; ++layer) {
    tables.modules.push_back("model.layers." + std::to_string(layer) + ".mlp");
    tables.modules.push_back("model.layers." + std::to_string(layer));
  }
  TableColumn reference, ddp, autotp;
  reference.title = "reference";
  ddp.title = "ddp";
  autotp.title = "autotp tp2";
  autotp.case_slug = "qwen2_tp2_bf16";
  ddp.losses = {12.13309765, 12.10635662};
  autotp.losses = {12.13316059};
  autotp.output_norms =
      ddp.output_norms = {{"model.layers.0", 374.6458}, {"model.layers.0.mlp", NAN}};
  autotp.from_baseline["model.layers.0"] = {
      {1000, 7.81e-3, 374.6, 0.1}, {100, 3.91e-3, 4.41, 0.01}, 2000};
  autotp.gradients_from_baseline = GradientComparison{3, 1.92e-4, 2.7e-5, 1.87e-3, "a", "b"};
  tables.columns = {reference, ddp, autotp};
  return tables;
}

TEST(Tables, TextShowsLossesNormsDifferencesAndGradients) {
  const std::string text = render_tables(two_runs());

  EXPECT_THAT(text, AllOf(HasSubstr("12.13316059 (5.19e-06)"), HasSubstr("374.646"),
                          HasSubstr("3.91e-03 8.87e-04"), HasSubstr("from ddp"),
                          HasSubstr("1.92e-04"), HasSubstr("1.87e-03")));
  EXPECT_THAT(text, HasSubstr("*\n")) << "what was compared in part only is marked";
}

TEST(Tables, TextShowsWhatOneRankHoldsOnlyIfAsked) {
  ComparisonTables tables = two_runs();
  TableColumn& autotp = tables.columns[2];
  autotp.local.outputs["model.layers.0"] = 264.92;
  GradientComparison& shards = autotp.local_from_baseline_sharded.emplace();
  shards.parameters = 14;
  shards.mean_relative = 0.2929;
  autotp.local_from_baseline_whole = GradientComparison{};
  autotp.same_bits = {"fsdp_tp tp2", 12, 11, 13, 11, {"model.norm"}};

  const std::string plain = render_tables(tables);
  tables.shows_local = true;
  const std::string local = render_tables(tables);

  EXPECT_THAT(plain, AllOf(Not(HasSubstr("rank 0 alone")),
                           HasSubstr("autotp tp2 and fsdp_tp tp2: 12 of 13 outputs and 11 of 11 "
                                     "output gradients; first different model.norm")));
  EXPECT_THAT(local, AllOf(HasSubstr("output norms on rank 0 alone"), HasSubstr("264.92"),
                           HasSubstr("autotp tp2, sharded"), HasSubstr("2.93e-01")));
}

TEST(Tables, TextOfManyLayersIsShortUnlessAllAreAskedFor) {
  const std::string some = render_tables(two_runs()), all = render_tables(two_runs(), true);

  EXPECT_THAT(some, AllOf(HasSubstr("model.layers.0.mlp"), HasSubstr("model.layers.3 "),
                          HasSubstr("model.layers.19 ")));
  EXPECT_THAT(some, AllOf(Not(HasSubstr("model.layers.1.mlp")), Not(HasSubstr("model.layers.10 ")),
                          HasSubstr("9 of 40 modules")));
  EXPECT_THAT(all, AllOf(HasSubstr("model.layers.10.mlp"), HasSubstr("model.layers.10 ")));
}

TEST(Tables, JsonHoldsEveryModuleOfEveryRun) {
  const nlohmann::json json = tables_json(two_runs());

  EXPECT_EQ(json["baseline"], "ddp");
  ASSERT_EQ(json["columns"].size(), 3U);
  const nlohmann::json& autotp = json["columns"][2];
  EXPECT_EQ(autotp["case"], "qwen2_tp2_bf16");
  EXPECT_NEAR(autotp["losses"][0]["relative_to_baseline"].get<double>(), 5.19e-6, 1e-8);
  ASSERT_EQ(autotp["modules"].size(), 40U);
  EXPECT_EQ(autotp["modules"][0]["output_norm"], "nan");
  EXPECT_EQ(autotp["modules"][1]["from_baseline"]["all"]["numel"], 1000);
  EXPECT_EQ(autotp["modules"][1]["from_baseline"]["elements"], 2000);
  EXPECT_TRUE(autotp["modules"][1]["from_reference"].is_null());
  EXPECT_EQ(autotp["gradients_from_baseline"]["max_relative"], 1.87e-3);
}

}  // namespace
}  // namespace isoshard
