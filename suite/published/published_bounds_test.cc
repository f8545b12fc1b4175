// SPDX-License-Identifier: Apache-2.0
/// The bounds around what seeds/000 published can fail. published_slow_test.cc runs the published
/// size.
#include "suite/published/published_bounds.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

namespace isoshard {
namespace {

/// Tables that hold exactly what was published.
ComparisonTables published() {
  ComparisonTables tables;
  tables.baseline = "ddp dp2";
  for (const char* title : {"ddp dp2", "autotp tp2", "autotp tp2 dp2", "fsdp_tp tp2 dp2"})
    tables.columns.emplace_back().title = title;
  for (const PublishedRow& row : published_rows(tables)) {
    TableColumn& column = *std::ranges::find(tables.columns, row.run, &TableColumn::title);
    ModuleDifference& difference = column.from_baseline[row.module];
    if (row.what == "output norm") column.output_norms[row.module] = row.published;
    if (row.what == "gradient norm") column.gradient_norms[row.module] = row.published;
    if (row.what == "output norm on rank 0 alone") column.local.outputs[row.module] = row.published;
    // The norm follows from max abs and relative difference.
    if (row.what.starts_with("max abs"))
      difference.first.max_abs = difference.whole.max_abs = row.published;
    if (row.what.starts_with("relative difference, first"))
      difference.first.norm = row.published > 0 ? difference.first.max_abs / row.published : 1;
    if (row.what.starts_with("relative difference, all")) {
      difference.whole.norm = 1;
      difference.whole.error_norm = row.published;
    }
  }
  tables.columns[0].losses = {12.13309765, 12.10635662};
  tables.columns[1].losses = {12.13316059};
  tables.columns[2].losses = tables.columns[3].losses = {12.13316059, 12.10641384};
  GradientComparison& shards = tables.columns[2].local_from_baseline_sharded.emplace();
  shards.parameters = 14;
  shards.mean_relative = 0.29;
  tables.columns[3].same_bits = {"autotp tp2 dp2", 13, 12, 13, 12, {}};
  return tables;
}

std::vector<PublishedRow> broken(const ComparisonTables& tables) {
  std::vector<PublishedRow> rows = published_rows(tables);
  std::erase_if(rows, [](const PublishedRow& row) { return row.holds; });
  return rows;
}

TEST(PublishedBoundsOfSeed000, HoldForThePublishedNumbersThemselves) {
  const std::vector<PublishedRow> rows = published_rows(published());

  EXPECT_EQ(rows.size(), 1U + 2 + 2 + 3 * 11 + 3 * 9 + 3 + 2 * 2 + 1 + 2 * 4 * 9);
  EXPECT_TRUE(broken(published()).empty()) << markdown(broken(published()));
}

TEST(PublishedBoundsOfSeed000, BreakForANumberOutsideThem) {
  const auto broken_by = [](const auto& change) {
    ComparisonTables tables = published();
    change(tables.columns[1]);
    const std::vector<PublishedRow> rows = broken(tables);
    return rows.size() == 1 ? rows.front().what + " " + rows.front().module
                            : fmt::format("{} rows", rows.size());
  };

  EXPECT_EQ(broken_by([](TableColumn& c) { c.output_norms["model.layers.1"] *= 1.031; }),
            "output norm model.layers.1");
  EXPECT_EQ(broken_by([](TableColumn& c) { c.output_norms["lm_head"] *= 1.05; }), "0 rows");
  EXPECT_EQ(broken_by([](TableColumn& c) { c.output_norms["lm_head"] *= 0.89; }),
            "output norm lm_head");
  EXPECT_EQ(broken_by([](TableColumn& c) {
              c.output_norms["model.layers.0.self_attn.q_proj"] /= std::sqrt(2);
            }),
            "output norm model.layers.0.self_attn.q_proj");
  EXPECT_EQ(broken_by([](TableColumn& c) { c.gradient_norms["model.norm"] *= 1.11; }),
            "gradient norm model.norm");
  EXPECT_EQ(broken_by([](TableColumn& c) { c.losses[0] *= 1 + 3e-5; }),
            "relative loss difference from ddp dp rank 0");
  EXPECT_EQ(broken_by([](TableColumn& c) { c.from_baseline["lm_head"].whole.max_abs *= 4.1; }),
            "max abs difference, all lm_head");
  EXPECT_EQ(broken_by([](TableColumn& c) {
              c.local.outputs["model.layers.0.self_attn.q_proj"] *= std::sqrt(2);
            }),
            "output norm on rank 0 alone model.layers.0.self_attn.q_proj");
  EXPECT_EQ(
      broken_by([](TableColumn& c) { c.from_baseline["model.norm"].whole.error_norm /= 4.1; }),
      "relative difference, all (of Frobenius norms) model.norm");
  EXPECT_EQ(
      broken_by([](TableColumn& c) { c.from_baseline["model.embed_tokens"].whole.max_abs = 1e-9; }),
      "max abs difference, all model.embed_tokens");
  EXPECT_EQ(broken_by([](TableColumn& c) { c.output_norms["model.norm"] = std::nan(""); }),
            "output norm model.norm");
  EXPECT_EQ(broken_by([](TableColumn& c) { c.output_norms.erase("model.norm"); }),
            "output norm model.norm");
}

TEST(PublishedBoundsOfSeed000, BreakWhereFsdpIsNotAutotpBitByBit) {
  const auto broken_by = [](const auto& change) {
    ComparisonTables tables = published();
    change(tables);
    std::string words;
    for (const PublishedRow& row : broken(tables)) words += row.run + ": " + row.module + "; ";
    return words;
  };
  const auto same = [](ComparisonTables& t) -> SameBits& { return *t.columns[3].same_bits; };

  const std::string run = "fsdp_tp tp2 dp2: ";
  EXPECT_EQ(broken_by([&](ComparisonTables& t) { same(t).outputs = 12; }),
            run + "module outputs; ");
  EXPECT_EQ(broken_by([&](ComparisonTables& t) { same(t).output_gradients = 0; }),
            run + "output gradients; ");
  EXPECT_EQ(broken_by([&](ComparisonTables& t) { same(t).as = "ddp dp2"; }),
            run + "module outputs; " + run + "output gradients; ");
  EXPECT_EQ(broken_by([](ComparisonTables& t) { t.columns[3].same_bits.reset(); }),
            run + "module outputs; " + run + "output gradients; ");
  EXPECT_EQ(broken_by([](ComparisonTables& t) {
              t.columns[3].losses[1] = std::nextafter(t.columns[3].losses[1], 0);
            }),
            run + "losses; ");
  // Whichever ran first.
  EXPECT_EQ(broken_by([](ComparisonTables& t) {
              t.columns[2].same_bits = std::exchange(t.columns[3].same_bits, std::nullopt);
              t.columns[2].same_bits->as = t.columns[3].title;
            }),
            "");
  for (const double shards : {0.0, 0.25, 0.5, std::nan("")})
    EXPECT_EQ(broken_by([&](ComparisonTables& t) {
                t.columns[2].local_from_baseline_sharded->mean_relative = shards;
              }),
              "autotp tp2 dp2: mean over sharded parameters; ");
}

}  // namespace
}  // namespace isoshard
