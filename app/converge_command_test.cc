// SPDX-License-Identifier: Apache-2.0
// `converge` through the whole program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "app/testing/malformed_rows.h"
#include "core/base/atomic_file.h"
#include "harness/curve/curve.h"
#include "suite/testing/json_schema.h"

namespace isoshard {
namespace {

using malformed::Arguments;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

/// Three steps of two layers on 16 tokens a sample.
ChildResult converge(const std::filesystem::path& folder, const Arguments& more) {
  Arguments all = {"converge", "--steps",          "3", "--num-layers", "2",  "--seq-length",
                   "16",       "--perturbed-runs", "2", "--output-dir", "out"};
  all.insert(all.end(), more.begin(), more.end());
  return malformed::run_isoshard(folder, all);
}

json read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return json::parse(file);
}

Schema schema_of(const char* name) {
  return Schema(read(std::filesystem::path(ISOSHARD_DOCS_DIR) / name));
}

TEST(ConvergeCommand, JudgesASetAndWritesWhatItFound) {
  const TestFolder folder;

  const ChildResult result = converge(folder.path(), {"--test", "cp=2,recompute", "--verbose"});

  ASSERT_EQ(result.exit_code, 0) << result.output << result.error;
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("(the control set, 1D FSDP, against ddp on a small model)"),
                    HasSubstr("pass      tokens-per-step"), HasSubstr("| 1D (2 ranks)"),
                    HasSubstr("| 2D (4 ranks)"), HasSubstr("FSDP 2, CP 2, recompute"),
                    HasSubstr("converges")));
  const json file = read(folder / "out/converge.json");
  EXPECT_THAT(schema_of("converge.schema.json").problem(file), IsEmpty());
  EXPECT_THAT(schema_of("report.schema.json").problem(read(folder / "out/report.json")), IsEmpty());
  EXPECT_EQ(file.at("sets")[0].at("runs")[0].at("status"), "converges");
  EXPECT_THAT(read_curves(folder / "out"), SizeIs(2));
  EXPECT_TRUE(std::filesystem::exists(folder / "out/curves.svg"));
  EXPECT_TRUE(std::filesystem::exists(folder / "out/converge.txt"));
}

TEST(ConvergeCommand, AFaultDivergesWithTheStepFromWhich) {
  const TestFolder folder;

  const ChildResult result =
      converge(folder.path(), {"--test", "cp=2", "--fault", "cp_divisor_missing"});

  EXPECT_EQ(result.exit_code, 1) << result.error;
  EXPECT_THAT(result.output, HasSubstr("DIVERGES, seen from step 0"));
  const json file = read(folder / "out/converge.json");
  EXPECT_THAT(schema_of("converge.schema.json").problem(file), IsEmpty());
  EXPECT_EQ(file.at("exit_code"), 1);
  EXPECT_EQ(file.at("sets")[0].at("runs")[0].at("seen_from"), 0);
}

TEST(ConvergeCommand, TakesATrainConfigOfTorchtitan) {
  const TestFolder folder;
  write_file_atomically(folder / "train.toml",
                        "[job]\ndump_folder = \"x\"\n[training]\nlocal_batch_size = 2\n"
                        "[parallelism]\ntensor_parallel_degree = 2\n");

  const ChildResult result = converge(folder.path(), {"--config", "train.toml"});

  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("train.toml: not used: job.dump_folder (of torchtitan's own files)"),
                    HasSubstr("every run has the local batch 2"),
                    HasSubstr("FSDP 2, TP 2, vocab-parallel")));
}

TEST(ConvergeSchema, RefusesWhatIsMissingOrExtra) {
  const json right = {{"schema", 1},
                      {"kind", "convergence"},
                      {"exit_code", 0},
                      {"rules", json::array()},
                      {"check", {{"status", "conforms"}, {"reason", ""}}},
                      {"control",
                       {{"title", "FSDP 2"},
                        {"mesh", {{"pp", 1}, {"dp", 2}, {"cp", 1}, {"tp", 1}}},
                        {"local_batch", 4},
                        {"seq_length", 64},
                        {"steps", 100},
                        {"runs", json::array()}}},
                      {"sets", json::array()}};
  const Schema schema = schema_of("converge.schema.json");
  ASSERT_THAT(schema.problem(right), IsEmpty());
  json lacking = right, extra = right;
  lacking.erase("rules");
  extra["control"]["tokens"] = 3;

  EXPECT_THAT(schema.problem(lacking), HasSubstr("rules"));
  EXPECT_THAT(schema.problem(extra), HasSubstr("tokens"));
}

/// Refused before any rank starts, with these words.
void refuses(const Arguments& arguments, int code, const std::string& words) {
  const TestFolder folder;
  Arguments all = {"converge"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  const ChildResult result = malformed::run_isoshard(folder.path(), all);
  EXPECT_EQ(result.exit_code, code);
  EXPECT_THAT(result.error, HasSubstr(words));
  EXPECT_THAT(malformed::tree_of(folder.path()), IsEmpty());
}

TEST(ConvergeFlags, OfTestSetsAreRefusedForAllRuns) {
  refuses({"--tp", "2"}, 2, "--tp is of a test set");
  refuses({"--micro-batches", "2"}, 2, "--micro-batches is of a test set");
  refuses({"--recompute"}, 2, "rule technique-control: --recompute is a technique");
  refuses({"--cp", "2", "--test", "tp=2"}, 2, "say it in --test");
}

TEST(ConvergeFlags, ThatBreakARuleAreRefusedByItsName) {
  refuses({"--test", "dp=4"}, 2, "rule dp-degree");
  refuses({"--test", "pp=4", "--batch-size", "2"}, 2, "rule pipeline-batch");
  refuses({"--test", "tp=1"}, 2, "rule degree");
}

TEST(ConvergeFlags, ThatAreWrongAreRefused) {
  refuses({"--preset", "5d"}, 2, "--preset must be one of fsdp, 3d");
  refuses({"--test", "async-tp"}, 2, "async-tp is not built");
  refuses({"--test", "tp=2", "--test", "tp=2"}, 2, "must name each set once");
  refuses({"--seeds", "0,0"}, 2, "must name each seed once");
  refuses({"--seeds", "x"}, 2, "must be whole numbers");
  refuses({"--seeds", "0", "--seed", "1"}, 2, "--seed and --seeds");
  refuses({"--test-seeds", "4"}, 2, "--test-seeds need at least 3 --seeds");
  refuses({"--seeds", "0,1,2", "--test-seeds", "2"}, 2, "--test-seeds must differ from --seeds");
  refuses({"--perturbed-runs", "0"}, 2, "--perturbed-runs must be from 1 to 100");
  refuses({"--scale-lr", "cubic"}, 2, "--scale-lr must be one of none, linear, sqrt");
  refuses({"--test", "tp=2", "--fault", "dp_sum_missing"}, 2, "--fault must be one that can");
  refuses({"--test", "cp=16"}, 2, "--test cp=16");
  refuses({"--config", "nowhere.toml"}, 3, "nowhere.toml");
}

}  // namespace
}  // namespace isoshard
