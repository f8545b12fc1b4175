// SPDX-License-Identifier: Apache-2.0
/// The published verification at its own size: `verify --preset published` gives the published
/// tables within the bounds of docs/internals/published.md.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "harness/cli/command.h"
#include "suite/published/published_bounds.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// As a report holds it: the parts that published_rows reads.
Difference difference_in(const json& j) {
  if (j.is_null()) return {};
  const double max_abs = j.at("max_abs"), by_norm = j.at("max_abs_by_norm"),
               relative = j.at("relative_error");
  const double norm = by_norm > 0 ? max_abs / by_norm : 1;
  return {j.at("numel"), max_abs, norm, relative * norm};
}

ComparisonTables tables_in(const json& j) {
  ComparisonTables tables;
  tables.baseline = j.at("baseline");
  for (const json& c : j.at("columns")) {
    TableColumn& column = tables.columns.emplace_back();
    column.title = c.at("title");
    for (const json& loss : c.at("losses")) column.losses.push_back(loss.at("loss"));
    for (const json& m : c.at("modules")) {
      const std::string name = m.at("name");
      if (m.at("output_norm").is_number()) column.output_norms[name] = m.at("output_norm");
      if (m.at("gradient_norm").is_number()) column.gradient_norms[name] = m.at("gradient_norm");
      if (const json& d = m.at("from_baseline"); !d.is_null())
        column.from_baseline[name] = {difference_in(d.at("all")), difference_in(d.at("first")),
                                      d.at("elements")};
    }
    if (const json& local = c.at("local"); !local.is_null()) {
      column.local.outputs = local.at("output_norms");
      if (const json& g = local.at("sharded_from_baseline"); !g.is_null()) {
        GradientComparison& shards = column.local_from_baseline_sharded.emplace();
        shards.parameters = g.at("parameters");
        shards.mean_relative = g.at("mean_relative");
      }
    }
    if (const json& same = c.at("same_bits"); !same.is_null())
      column.same_bits = {same.at("as"),
                          same.at("outputs"),
                          same.at("output_gradients"),
                          same.at("outputs_of"),
                          same.at("output_gradients_of"),
                          {}};
  }
  return tables;
}

TEST(PublishedSize, PublishedSizeGivesThePublishedTables) {
  const fs::path folder = fs::temp_directory_path() / fmt::format("isoshard-seed-000-{}", getpid());
  const std::array commands = {verify_command()};

  const int code = run_command_line(
      commands, {"verify", "--preset", "published", "--tables", "local", "--output-dir", folder});
  std::ifstream file(folder / "report.json");
  const json report = json::parse(file);
  fs::remove_all(folder);

  EXPECT_EQ(code, 0);
  ASSERT_EQ(report.at("tables").size(), 1U);
  const std::vector<PublishedRow> rows = published_rows(tables_in(report.at("tables")[0]));
  fmt::print("{}\n", markdown(rows));
  for (const PublishedRow& row : rows) {
    EXPECT_TRUE(row.holds) << row.run << ", " << row.module << ", " << row.what << ": published "
                           << row.published << ", measured " << row.measured;
  }
}

}  // namespace
}  // namespace isoshard
