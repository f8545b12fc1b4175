// SPDX-License-Identifier: Apache-2.0
// Each experiment at sizes that take a second: its claims hold,
// its numbers are there, and it can fail.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/core/grad_mode.h>
#include <nlohmann/json.hpp>

#include "core/base/error.h"
#include "harness/testing/run_world.h"
#include "subjects/parallel/tensor/tensor_parallel_strategy.h"
#include "suite/published/differences.h"
#include "suite/published/experiment.h"
#include "suite/published/internal.h"
#include "suite/published/transformer_stack.h"

namespace isoshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

ExperimentSettings tiny(ExperimentKind kind) {
  ExperimentSettings settings = default_settings(kind, false);
  settings.hidden_size = 48;
  settings.num_heads = 12;
  settings.ffn_size = 96;
  settings.seq_length = 9;
  return settings;
}

TEST(Experiments, InitIsBitEqualForEveryTp) {
  ExperimentSettings settings = tiny(ExperimentKind::kInit);
  settings.tp = {1, 2, 3, 4};
  settings.dtypes = {Dtype::kFloat32, Dtype::kBFloat16};

  const ExperimentReport report = run_experiment(ExperimentKind::kInit, settings);

  EXPECT_TRUE(report.holds) << report.text;
  EXPECT_THAT(report.text,
              HasSubstr("all 26 parameters of tp 1, 2, 3, 4 are bit-equal, max diff = 0.0"));
  const nlohmann::json json = nlohmann::json::parse(report.json);
  const nlohmann::json& by_tp = json.at("parts").at(0).at("parameters_by_tp");
  ASSERT_EQ(by_tp.size(), 4U);
  std::int64_t sharded = 0;
  for (std::size_t i = 0; i < 26; ++i) {
    const auto whole = by_tp[0][i].at("local_numel").get<std::int64_t>(),
               third = by_tp[2][i].at("local_numel").get<std::int64_t>();
    sharded += third * 3 == whole ? 1 : 0;
  }
  EXPECT_EQ(sharded, 12)
      << "of 2 layers: qkv and fc1 with their biases, the weights of proj and fc2";
}

TEST(Experiments, RingAndTreeGiveThePublishedPercentages) {
  ExperimentSettings settings = default_settings(ExperimentKind::kColumnRow, false);
  settings.seq_length = 32;
  settings.hidden_size = 512;

  const ExperimentReport report = run_experiment(ExperimentKind::kColumnRow, settings);

  EXPECT_TRUE(report.holds) << report.text;
  for (const char* const order : {"ring", "tree"})
    EXPECT_THAT(report.text, HasSubstr(std::string("holds: ") + order + ": ")) << report.text;
  const nlohmann::json json = nlohmann::json::parse(report.json);
  for (const nlohmann::json& part : json.at("parts")) {
    if (part.at("layer") != "row") continue;
    const Differences d = differences_of(part.at("result").at("differences"));
    // fp32 accumulation over the ranks rounds once and differs less.
    EXPECT_LT(d.percent_above(1e-4), part.at("order") == "ordered" ? 45 : 55);
    EXPECT_GT(d.percent_above(1e-4), 35);
  }
}

TEST(Experiments, StackedPairsDifferMoreAndMore) {
  ExperimentSettings settings = tiny(ExperimentKind::kStack);
  settings.tp = {3};
  settings.orders = {ReductionOrder::kOrdered, ReductionOrder::kRing, ReductionOrder::kTree};
  settings.dtypes = {Dtype::kBFloat16, Dtype::kFloat32};

  const ExperimentReport report = run_experiment(ExperimentKind::kStack, settings);

  EXPECT_TRUE(report.holds) << report.text;
  EXPECT_EQ(nlohmann::json::parse(report.json).at("parts").size(), 6U);
}

TEST(Experiments, GrowthKeepsThePublishedTolerances) {
  ExperimentSettings settings = tiny(ExperimentKind::kGrowth);
  settings.tp = {3};
  settings.layers = 5;

  const ExperimentReport report = run_experiment(ExperimentKind::kGrowth, settings);

  EXPECT_TRUE(report.holds) << report.text;
  EXPECT_THAT(report.text, AllOf(HasSubstr("within the published 0.15 absolute"),
                                 HasSubstr("within the published 0.001 absolute"),
                                 HasSubstr("| Max absolute diff"), HasSubstr("TP=3: [")));
  const nlohmann::json json = nlohmann::json::parse(report.json);
  for (const nlohmann::json& part : json.at("parts")) {
    ASSERT_EQ(part.at("result").at("layers").size(), 5U);
    EXPECT_GT(differences_of(part.at("result").at("final")).max, 0)
        << "a tp of 3 rounds otherwise than one process";
  }
}

TEST(Experiments, ATpOfOneIsTheSingleProcess) {
  for (const ExperimentKind kind : {ExperimentKind::kStack, ExperimentKind::kGrowth}) {
    ExperimentSettings settings = tiny(kind);
    settings.tp = {1};
    settings.layers = 2;

    const nlohmann::json json = nlohmann::json::parse(run_experiment(kind, settings).json);

    for (const nlohmann::json& part : json.at("parts")) {
      const nlohmann::json& layers =
          kind == ExperimentKind::kStack ? part.at("layers") : part.at("result").at("layers");
      for (const nlohmann::json& layer : layers) EXPECT_EQ(differences_of(layer).max, 0);
    }
  }
}

TEST(Experiments, SettingsThatDoNotFitAreNamed) {
  const auto refused = [](ExperimentKind kind, auto change) {
    return [=] {
      ExperimentSettings settings = tiny(kind);
      change(settings);
      (void)run_experiment(kind, settings);
    };
  };

  EXPECT_THAT(refused(ExperimentKind::kGrowth, [](auto& s) { s.tp = {5}; }),
              ThrowsMessage<UsageError>(HasSubstr("tp 5 does not divide the ffn size of 96")));
  EXPECT_THAT(
      refused(ExperimentKind::kGrowth, [](auto& s) { s.tp = {8}; }),
      ThrowsMessage<UsageError>(HasSubstr("tp 8 does not divide the number of heads of 12")));
  EXPECT_THAT(refused(ExperimentKind::kGrowth, [](auto& s) { s.num_heads = 7; }),
              ThrowsMessage<UsageError>(HasSubstr("7 heads")));
  EXPECT_THAT(refused(ExperimentKind::kStack,
                      [](auto& s) {
                        s.tp = {2, 4};
                      }),
              ThrowsMessage<UsageError>(HasSubstr("takes one tp degree, got 2")));
  EXPECT_THAT(
      refused(ExperimentKind::kStack, [](auto& s) { s.layers = 0; }),
      ThrowsMessage<UsageError>(HasSubstr("the number of layers must be at least 1, got 0")));
  EXPECT_THAT(refused(ExperimentKind::kStack, [](auto& s) { s.dtypes = {Dtype::kInt64}; }),
              ThrowsMessage<UsageError>(HasSubstr("int64")));
  EXPECT_THAT(
      refused(ExperimentKind::kStack, [](auto& s) { s.orders = {ReductionOrder::kNative}; }),
      ThrowsMessage<UsageError>(HasSubstr("native")));
  EXPECT_THAT([] { (void)parse_experiment_kind("stak"); },
              ThrowsMessage<UsageError>(HasSubstr("did you mean 'stack'")));
}

TEST(Experiments, AFailedClaimIsNoSuccess) {
  detail::Findings findings(ExperimentKind::kStack, {});
  findings.claim(true, "one");
  findings.claim(false, "two");
  findings.claim(true, "three");

  const ExperimentReport report = findings.report();

  EXPECT_FALSE(report.holds);
  EXPECT_THAT(report.text, HasSubstr("FAILS: two"));
  EXPECT_FALSE(nlohmann::json::parse(report.json).at("holds").get<bool>());
  EXPECT_FALSE(detail::digests_agree({{{"digest", "a"}}, {{"digest", "b"}}}));
  EXPECT_FALSE(detail::digests_agree({{{"max", 0}}}));
}

// The first published test at a small width, and its negative control: every rank has the first
// shard of fc2.
TEST(TpVsDp, AWrongLayerIsOutsideThePublishedTolerance) {
  ExperimentSettings settings = tiny(ExperimentKind::kGrowth);
  settings.layers = 1;

  run_world(3, [settings](Rank& rank) {
    const at::NoGradGuard no_grad;
    const TransformerStack stack(settings);
    const TensorParallelStrategy split(stack.plan(), rank.comm(), 1, 1.0);
    const auto specs = stack.layer_parameters(0);
    const at::Tensor x = stack.input(Dtype::kFloat32);
    const at::Tensor reference =
        stack.forward_layer(0, stack.read_all(specs, Dtype::kFloat32, 0, 1), Strategy(), x);
    const Parameters right = stack.read_all(specs, Dtype::kFloat32, rank.rank(), rank.size());
    Parameters wrong = right;
    wrong["decoder.layers.0.mlp.linear_fc2.weight"] =
        stack.read(specs.at(10), Dtype::kFloat32, 0, rank.size());

    ASSERT_EQ(specs.at(10).name, "decoder.layers.0.mlp.linear_fc2.weight");
    EXPECT_LE(differences(reference, stack.forward_layer(0, right, split, x)).worst_excess, 1e-3);
    EXPECT_GT(differences(reference, stack.forward_layer(0, wrong, split, x)).worst_excess, 1e-3);
  });
}

}  // namespace
}  // namespace isoshard
