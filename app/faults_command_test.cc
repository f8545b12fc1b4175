// SPDX-License-Identifier: Apache-2.0
/// `isoshard faults run` and `study`: rows, exit codes, files, and what they refuse.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "app/commands.h"
#include "harness/cli/command.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::internal::CaptureStderr;
using ::testing::internal::CaptureStdout;
using ::testing::internal::GetCapturedStderr;
using ::testing::internal::GetCapturedStdout;
using Words = std::vector<std::string>;

class FaultsCommand : public ::testing::Test {
 protected:
  FaultsCommand() { fs::create_directories(folder_); }
  ~FaultsCommand() override { fs::remove_all(folder_); }

  int command(Words words) const {
    words.insert(words.begin(), "faults");
    const std::array commands = {faults_command()};
    return run_command_line(commands, words);
  }
  /// What is said of words that are refused.
  std::string refused(const Words& words) const {
    CaptureStderr();
    EXPECT_EQ(command(words), 2);
    return GetCapturedStderr();
  }
  [[nodiscard]] std::string text_of(const char* name) const {
    std::ifstream file(folder_ / name);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  fs::path folder_ = fs::temp_directory_path() / fmt::format("isoshard-faults-{}", getpid());
};
/// Of all cases of a study: under slow.
class FaultsCommandStudy : public FaultsCommand {};

TEST_F(FaultsCommand, RunHasARowForEachDtype) {
  CaptureStdout();
  ASSERT_EQ(command({"run", "dp_sum_missing", "--output-dir", folder_.string()}), 0);
  EXPECT_THAT(GetCapturedStdout(),
              HasSubstr("1 faults in 2 runs: 2 alarms, 2 with the first tensor and 2 with"));

  const nlohmann::json report = nlohmann::json::parse(text_of("report.json"));
  ASSERT_EQ(report.at("cases").size(), 2U);
  std::set<std::string> dtypes;
  for (const nlohmann::json& item : report.at("cases")) {
    const nlohmann::json& row = item.at("detection").at("row");
    dtypes.insert(row.at("dtype").get<std::string>());
    EXPECT_TRUE(row.at("alarm").get<bool>() && row.at("first_tensor").get<bool>());
    EXPECT_TRUE(row.at("cause").get<bool>());
    EXPECT_GT(row.at("seconds").get<double>(), 0);
  }
  EXPECT_EQ(dtypes, (std::set<std::string>{"bf16", "fp32"}));
}

// A legal difference raises none, so it stands for a fault that goes unseen.
TEST_F(FaultsCommand, AFaultWithoutAnAlarmFailsTheRun) {
  EXPECT_EQ(command({"run", "dp_sum_missing", "sum_order"}), 1);
}

TEST_F(FaultsCommand, WhatDoesNotFitIsRefused) {
  EXPECT_THAT(refused({"study"}), HasSubstr("study needs --output-dir DIR"));
  EXPECT_THAT(refused({"study", "dp_sum_missing", "--output-dir", folder_.string()}),
              HasSubstr("leave out ids"));
  EXPECT_THAT(refused({"run", "--count", "3"}), HasSubstr("--count is an option of"));
  EXPECT_THAT(refused({"run", "--noise-only"}), HasSubstr("--noise-only is an option of"));
  EXPECT_THAT(refused({"study", "--count", "0", "--output-dir", folder_.string()}),
              HasSubstr("--count at least 1"));
}

TEST_F(FaultsCommandStudy, WritesItsFilesAndGoesOnFromThem) {
  const Words study = {"study", "--curve-steps", "2", "--output-dir", folder_.string()};
  Words one = study, two = study, other = study;
  one.insert(one.end(), {"--count", "1"});
  two.insert(two.end(), {"--count", "2"});
  other.insert(other.end(), {"--seed", "2"});

  ASSERT_EQ(command(one), 0);
  const std::string first = text_of("study.csv");
  ASSERT_EQ(command(two), 0);

  const std::string both = text_of("study.csv");
  EXPECT_TRUE(both.starts_with(first));
  EXPECT_EQ(std::ranges::count(both, '\n') - std::ranges::count(first, '\n'), 1);
  EXPECT_THAT(text_of("study.md"), HasSubstr("| isoshard, exact | 0 of 28 |"));
  EXPECT_THAT(text_of("sensitivity.svg"), HasSubstr("</svg>"));
  CaptureStderr();
  EXPECT_EQ(command(other), 3) << "another seed";
  EXPECT_THAT(GetCapturedStderr(), HasSubstr("take another --output-dir"));
}

}  // namespace
}  // namespace isoshard
