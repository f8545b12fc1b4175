// SPDX-License-Identifier: Apache-2.0
/// docs/reference/report.schema.json describes every report.json that is written.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "app/commands.h"
#include "fixtures/cases/features.h"
#include "harness/cli/command.h"
#include "harness/report/json/json_report.h"
#include "harness/report/json/verdict_json.h"
#include "harness/report/tables.h"
#include "suite/testing/json_schema.h"
#include "suite/train/judge_training.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;
using testing::IsEmpty;

json read(const fs::path& path) {
  std::ifstream file(path);
  return json::parse(file);
}

class ReportSchema : public ::testing::Test {
 protected:
  ReportSchema()
      : schema_(read(fs::path(ISOSHARD_DOCS_DIR) / "report.schema.json")),
        folder_(fs::temp_directory_path() / fmt::format("isoshard-report-schema-{}", getpid())) {
    fs::create_directories(folder_);
  }
  ~ReportSchema() override { fs::remove_all(folder_); }

  /// The report that the command writes.
  [[nodiscard]] json written(int exit_code, std::vector<std::string> words) const {
    for (const char* word : {"--output-dir"}) words.emplace_back(word);
    words.push_back(folder_ / "report");
    const std::array commands = {verify_command(), train_command(), compare_command(),
                                 experiment_command()};
    EXPECT_EQ(run_command_line(commands, words), exit_code);
    return read(folder_ / "report" / "report.json");
  }

  Schema schema_;
  fs::path folder_;
};

TEST_F(ReportSchema, DescribesVerifyWithTablesAndCompare) {
  const json verify =
      written(0, {"verify", "--model", "tiny", "--subjects", "ddp", "autotp", "--tp", "2", "--dp",
                  "2", "--dtype", "bf16", "--dump", folder_ / "runs"});

  EXPECT_THAT(schema_.problem(verify), IsEmpty());
  ASSERT_EQ(verify.at("cases").size(), 2U);
  ASSERT_EQ(verify.at("tables").size(), 1U);
  EXPECT_EQ(verify.at("tables")[0].at("columns").size(), 3U);
  EXPECT_EQ(verify.at("features").size(), features().size());
  EXPECT_EQ(verify.at("features")[0].at("name"), "ddp");
  EXPECT_EQ(verify.at("features")[0].at("cases"), 1);
  EXPECT_THAT(schema_.problem(written(0, {"compare", "--input-dir", folder_ / "runs"})), IsEmpty());
}

// Whatever is judged is the same from run to run; times are not, and stand elsewhere.
TEST_F(ReportSchema, DescribesTimesOfCollectivesApartFromTheCases) {
  const std::vector<std::string> words = {"verify", "--model", "tiny", "--subjects",  "autotp",
                                          "--tp",   "2",       "--dp", "2",           "--dtype",
                                          "fp32",   "--steps", "2",    "--reference", "plain"};
  const json report = written(0, words), again = written(0, words);

  EXPECT_THAT(schema_.problem(report), IsEmpty());
  EXPECT_EQ(report.at("cases"), again.at("cases"));
  ASSERT_EQ(report.at("collective_times").size(), 1U);
  const json& item = report.at("collective_times")[0];
  EXPECT_EQ(item.at("case"), report.at("cases")[0].at("case"));
  std::map<std::string, double> calls;  // of rank 0 in the first step, as recorded
  for (const json& lane : report.at("cases")[0].at("evidence").at("calls")) {
    if (lane.at("rank") != 0) continue;
    for (const json& run : lane.at("runs"))
      calls[run.at("purpose")] += run.at("repeat").get<double>();
  }
  ASSERT_EQ(calls.count("row_parallel.forward"), 1U);
  for (const json& row : item.at("collectives")) {
    const std::string purpose = row.at("purpose");
    EXPECT_EQ(row.at("calls_per_step_and_rank"), calls[purpose]) << purpose;
    EXPECT_GT(row.at("ms_per_step_and_rank"), 0) << purpose;
    EXPECT_GT(row.at("median_call_ms"), 0) << purpose;
    EXPECT_LE(row.at("median_call_ms"), row.at("ms_per_step_and_rank").get<double>() * 2)
        << purpose;
    EXPECT_EQ(row.at("hidden_ms_per_step_and_rank"), 0) << purpose << ": shm moves all at once";
    calls.erase(purpose);
  }
  EXPECT_THAT(calls, IsEmpty()) << "every purpose has its times";
}

TEST_F(ReportSchema, DescribesARunThatDiverges) {
  const json report = written(1, {"verify", "--fault", "mlp_input_grad_partial", "--tables", "on"});

  EXPECT_THAT(schema_.problem(report), IsEmpty());
  EXPECT_FALSE(report.at("cases")[0].at("findings").empty());
  EXPECT_EQ(report.at("tables").size(), 1U);
}

TEST_F(ReportSchema, DescribesACaseThatBrokeDown) {
  const json report = written(4, {"verify", "--fault", "dp_sum_missing", "--dp", "1"});

  EXPECT_THAT(schema_.problem(report), IsEmpty());
  EXPECT_EQ(report.at("cases")[0].at("status"), "incomplete");
}

TEST_F(ReportSchema, DescribesCurvesOfTrainAndCompare) {
  const json train = written(0, {"train", "--model", "tiny", "--subjects", "reference", "ddp",
                                 "--dp", "2", "--steps", "3", "--perturbed-runs", "1"});
  fs::copy(folder_ / "report", folder_ / "curves");
  const json compare = written(0, {"compare", folder_ / "curves" / "loss_reference.json",
                                   folder_ / "curves" / "loss_ddp.json"});

  EXPECT_THAT(schema_.problem(train), IsEmpty());
  ASSERT_EQ(train.at("curves").size(), 2U);
  EXPECT_TRUE(train.at("curves")[0].at("status").is_null());
  EXPECT_EQ(train.at("curves")[1].at("status"), "conforms");
  EXPECT_EQ(train.at("curves")[1].at("steps"), 3);
  EXPECT_TRUE(train.at("cases").empty());
  EXPECT_THAT(schema_.problem(compare), IsEmpty());
  ASSERT_EQ(compare.at("curves").size(), 1U);
  EXPECT_EQ(compare.at("curves")[0].at("subject"), "ddp");
}

TEST_F(ReportSchema, DescribesExperiments) {
  const json report = written(0, {"experiment", "init"});

  EXPECT_THAT(schema_.problem(report), IsEmpty());
  ASSERT_EQ(report.at("cases").size(), 1U);
  EXPECT_EQ(report.at("cases")[0].at("experiment"), "init");
}

TEST_F(ReportSchema, DescribesGoldensAndRunsThatBrokeDown) {
  Report made;
  made.add(ReportGolden{"curve_ddp", "refused", "REFUSED  curve_ddp\n"}, kExitGolden);
  made.add(ReportCurve{.name = "qwen2_dp2", .failure = "rank 1 crashed"});

  const json report = report_json(made);

  EXPECT_THAT(schema_.problem(report), IsEmpty());
  EXPECT_EQ(report.at("exit_code"), kExitInfrastructure);
  EXPECT_EQ(report.at("curves")[0].at("status"), "incomplete");
  EXPECT_EQ(report.at("goldens")[0].at("status"), "refused");
}

/// As report.json has it.
json case_of(const Verdict& verdict) {
  json item = verdict_json(verdict);
  item["unmet"] = nullptr;
  return item;
}

TEST_F(ReportSchema, DescribesNumbersThatJsonLacks) {
  Verdict verdict;
  verdict.tensors.emplace_back().stats.max_abs = NAN;
  ComparisonTables tables;
  tables.modules = {"m"};
  tables.columns.emplace_back().output_norms["m"] = INFINITY;

  const json report = {{"schema", 2},
                       {"exit_code", 1},
                       {"cases", {case_of(verdict)}},
                       {"tables", {tables_json(tables)}},
                       {"notes", json::array()}};

  EXPECT_THAT(schema_.problem(report), IsEmpty());
}

// One change each to a right report.
TEST_F(ReportSchema, RefusesWhatIsMissingExtraOrOfAnotherType) {
  Verdict verdict;
  verdict.tensors.emplace_back();
  ComparisonTables tables;
  tables.modules = {"m"};
  tables.columns.emplace_back().output_norms["m"] = 1;
  const json right = {{"schema", 2},
                      {"exit_code", 0},
                      {"cases", {case_of(verdict)}},
                      {"tables", {tables_json(tables)}},
                      {"notes", json::array()}};
  ASSERT_THAT(schema_.problem(right), IsEmpty());
  const auto changed = [&](const char* pointer, const json& value) {
    json report = right;
    report[json::json_pointer(pointer)] = value;
    return schema_.problem(report);
  };
  json lacking = right;
  lacking.at("cases")[0].at("tensors")[0].erase("max_abs");

  EXPECT_THAT(schema_.problem(lacking), HasSubstr("$.cases[0].tensors[0] has no \"max_abs\""));
  EXPECT_THAT(changed("/extra", 1), HasSubstr("$.extra is not allowed"));
  EXPECT_THAT(changed("/schema", 1), HasSubstr("$.schema is not 2"));
  EXPECT_THAT(changed("/cases/0/status", "fine"), HasSubstr("$.cases[0].status is \"fine\""));
  EXPECT_THAT(changed("/cases/0/compared", -1), HasSubstr("below 0"));
  EXPECT_THAT(changed("/cases/0/tensors/0/max_abs", "large"), HasSubstr("max_abs"));
  EXPECT_THAT(changed("/tables/0/columns/0/modules/0/output_norm", true),
              HasSubstr("output_norm is boolean"));
  EXPECT_THAT(changed("/tables/0/columns/0/losses", {{{"dp_rank", 0}}}),
              HasSubstr("has no \"loss\""));
}

}  // namespace
}  // namespace isoshard
