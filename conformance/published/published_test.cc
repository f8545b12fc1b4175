// SPDX-License-Identifier: Apache-2.0
// The published tests and tables of docs/internals/seeds.md 3 at their
// published sizes. Slow: minutes to an hour.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "suite/published/differences.h"
#include "suite/published/experiment.h"

namespace isoshard {
namespace {

const nlohmann::json& only_part(const nlohmann::json& report) {
  EXPECT_EQ(report.at("parts").size(), 1U);
  return report.at("parts").at(0);
}

// fp32, 1 layer, atol 1e-3, rtol 1e-3.
TEST(PublishedTpVsDp, test_tp_vs_dp_fp32_equivalence) {
  ExperimentSettings settings = default_settings(ExperimentKind::kGrowth, true);
  settings.layers = 1;
  settings.dtypes = {Dtype::kFloat32};

  const ExperimentReport report = run_experiment(ExperimentKind::kGrowth, settings);

  EXPECT_TRUE(report.holds) << report.text;
  const nlohmann::json json = nlohmann::json::parse(report.json);
  const Differences layer = differences_of(only_part(json).at("result").at("layers").at(0));
  EXPECT_EQ(layer.numel, 2 * 4096 * 1024);
  EXPECT_LE(layer.worst_excess, 1e-3);
  EXPECT_GT(layer.max, 0);
}

// bf16, 28 layers, atol 0.15, rtol 0.
TEST(PublishedTpVsDp, test_tp_vs_dp_equivalence) {
  ExperimentSettings settings = default_settings(ExperimentKind::kGrowth, true);
  settings.dtypes = {Dtype::kBFloat16};

  const ExperimentReport report = run_experiment(ExperimentKind::kGrowth, settings);

  EXPECT_TRUE(report.holds) << report.text;
  const nlohmann::json json = nlohmann::json::parse(report.json);
  ASSERT_EQ(only_part(json).at("result").at("layers").size(), 28U);
  const Differences last = differences_of(only_part(json).at("result").at("final"));
  EXPECT_LE(last.max, 0.15);
  EXPECT_GT(last.max, 0);
}

// Both dtypes over 28 layers, as `isoshard experiment growth --full`.
TEST(PublishedGrowth, StaysWithinThePublishedTolerancesInFp32) {
  ExperimentSettings settings = default_settings(ExperimentKind::kGrowth, true);
  settings.dtypes = {Dtype::kFloat32};

  const ExperimentReport report = run_experiment(ExperimentKind::kGrowth, settings);

  EXPECT_TRUE(report.holds) << report.text;
}

class PublishedTables : public ::testing::TestWithParam<ExperimentKind> {};

TEST_P(PublishedTables, HoldAtThePublishedSizes) {
  const ExperimentReport report = run_experiment(GetParam(), default_settings(GetParam(), true));

  EXPECT_TRUE(report.holds) << report.text;
}

INSTANTIATE_TEST_SUITE_P(Experiments, PublishedTables,
                         ::testing::Values(ExperimentKind::kInit, ExperimentKind::kColumnRow,
                                           ExperimentKind::kStack),
                         [](const auto& kind) {
                           return std::string(kind.param == ExperimentKind::kColumnRow
                                                  ? "column_row"
                                                  : name_of(kind.param));
                         });

}  // namespace
}  // namespace isoshard
