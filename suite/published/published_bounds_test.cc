// SPDX-License-Identifier: Apache-2.0
/// The bounds around what seeds/000 published can fail. published_slow_test.cc runs the published
/// size.
#include "suite/published/published_bounds.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace isoshard {
namespace {

/// Tables that hold exactly what was published.
ComparisonTables published() {
  ComparisonTables tables;
  tables.baseline = "ddp dp2";
  tables.columns.resize(3);
  for (std::size_t c = 0; c < 3; ++c)
    tables.columns[c].title = std::array{"ddp dp2", "autotp tp2", "autotp tp2 dp2"}.at(c);
  for (const PublishedRow& row : published_rows(tables, "ddp dp2", {"autotp tp2"})) {
    TableColumn& column = row.run == "ddp dp2" ? tables.columns[0] : tables.columns[1];
    ModuleDifference& difference = column.from_baseline[row.module];
    if (row.what == "output norm") column.output_norms[row.module] = row.published;
    if (row.what == "gradient norm") column.gradient_norms[row.module] = row.published;
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
  tables.columns[2].losses = {12.13316059, 12.10641384};
  return tables;
}

std::vector<PublishedRow> broken(const ComparisonTables& tables) {
  std::vector<PublishedRow> rows =
      published_rows(tables, "ddp dp2", {"autotp tp2", "autotp tp2 dp2"});
  std::erase_if(rows, [](const PublishedRow& row) { return row.holds; });
  return rows;
}

TEST(PublishedBoundsOfSeed000, HoldForThePublishedNumbersThemselves) {
  const std::vector<PublishedRow> rows =
      published_rows(published(), "ddp dp2", {"autotp tp2", "autotp tp2 dp2"});

  EXPECT_EQ(rows.size(), 3U + 2 * 11 + 2 * 9 + 4 * 9);
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

}  // namespace
}  // namespace isoshard
