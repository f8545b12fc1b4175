// SPDX-License-Identifier: Apache-2.0
/// Bundles of real frameworks (fixtures/frameworks) given to isoshard-judge: right runs conform,
/// and each planted bug is found with the first tensor, rank and cause that expected.json says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "app/judge/judge_program.h"
#include "harness/testing/test_child.h"
#include "harness/testing/test_folder.h"

namespace isoshard {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::IsEmpty;

constexpr std::uintmax_t kMaxBytes = 1'000'000;
const char* const kExpected = "expected.json";

const fs::path& bundles() {
  static const fs::path folder = ISOSHARD_FRAMEWORKS_DIR;
  return folder;
}

json read_json(const fs::path& file) {
  std::ifstream stream(file);
  return json::parse(stream);
}

std::set<std::string> folders_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory()) names.insert(entry.path().filename().string());
  }
  return names;
}

/// One stored run, and what must be said of it.
struct StoredRun {
  std::string framework, name;
  std::vector<std::string> options;
  json expected;
};

void PrintTo(const StoredRun& run, std::ostream* out) {
  *out << run.framework << '/' << run.name;
}

std::vector<StoredRun> runs_of(const fs::path& folder) {
  const json expected = read_json(folder / kExpected);
  std::vector<std::string> options;
  for (const auto& [option, value] : expected.at("options").items()) {
    options.push_back(option);
    options.push_back(value.get<std::string>());
  }
  std::vector<StoredRun> runs;
  for (const auto& [name, words] : expected.at("runs").items())
    runs.push_back({folder.filename().string(), name, options, words});
  return runs;
}

std::vector<StoredRun> all_runs() {
  std::vector<StoredRun> runs;
  for (const std::string& framework : folders_in(bundles())) {
    if (!fs::exists(bundles() / framework / kExpected)) continue;  // MatchExpectations says so
    for (StoredRun& run : runs_of(bundles() / framework)) runs.push_back(std::move(run));
  }
  return runs;
}

/// What is there without its counterpart, in words: bundles that no expectation names, expectations
/// without a bundle, and frameworks that have not both a right and a faulty run.
std::vector<std::string> unmatched(const fs::path& folder) {
  if (!fs::exists(folder / kExpected)) return {kExpected};
  std::set<std::string> wanted = {"reference"};
  for (const StoredRun& run : runs_of(folder)) wanted.insert(run.name);
  const std::set<std::string> there = folders_in(folder);
  std::vector<std::string> names;
  std::ranges::set_symmetric_difference(wanted, there, std::back_inserter(names));
  if (!wanted.contains("right")) names.emplace_back("right");
  if (std::ranges::none_of(wanted, [](const std::string& n) { return n.starts_with("faulty_"); }))
    names.emplace_back("faulty_*");
  return names;
}

std::uintmax_t bytes_below(const fs::path& folder) {
  std::uintmax_t sum = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) sum += entry.file_size();
  }
  return sum;
}

/// Whether a value of a cause is the expected one. Real numbers may be off by 0.5 %: they are
/// measured.
bool is_expected(const json& expected, const json& seen) {
  if (expected.is_number_float() && seen.is_number())
    return std::fabs(expected.get<double>() - seen.get<double>()) <=
           0.005 * std::fabs(expected.get<double>());
  return expected == seen;
}

/// The names of the values of a cause that are not as expected. More values may be there.
std::vector<std::string> wrong_values(const json& expected, const json& cause) {
  std::vector<std::string> wrong;
  for (const char* const part : {"numbers", "words"}) {
    for (const auto& [name, value] : expected.at(part).items())
      if (!is_expected(value, cause.at(part).value(name, json()))) wrong.push_back(name);
  }
  return wrong;
}

class FrameworkBundles : public ::testing::TestWithParam<StoredRun> {};

TEST_P(FrameworkBundles, GetTheExpectedVerdict) {
  const StoredRun& run = GetParam();
  const json& expected = run.expected;
  const fs::path folder = bundles() / run.framework;
  const TestFolder output;
  std::vector<std::string> arguments = {"compare", (folder / "reference").string(),
                                        (folder / run.name).string(), "--output-dir",
                                        output.path().string()};
  arguments.insert(arguments.end(), run.options.begin(), run.options.end());

  const ChildResult result = run_in_child([&] { return run_judge(arguments); });

  ASSERT_THAT(result.error, IsEmpty());
  EXPECT_EQ(result.exit_code, run.name == "right" ? 0 : 1) << result.output;
  const json verdict = read_json(output / "report.json").at("cases").at(0);
  EXPECT_EQ(verdict.at("status"), expected.at("status"));
  if (run.name == "right") {
    EXPECT_EQ(verdict.at("strength"), expected.at("strength"));
    return;
  }
  const json& first = verdict.at("findings").at(0);
  for (const char* const part : {"step", "kind", "name", "call"})
    EXPECT_EQ(first.at(part), expected.at("first").at(part)) << part;
  EXPECT_EQ(first.at("ranks"), expected.at("ranks"));
  EXPECT_EQ(first.at("finding").at("id"), expected.at("finding"));
  const json &cause = first.at("cause"), &wanted = expected.at("cause");
  ASSERT_EQ(cause.is_null(), wanted.is_null()) << first.at("diagnosis");
  if (wanted.is_null()) return;
  EXPECT_EQ(cause.at("id"), wanted.at("id"));
  EXPECT_THAT(wrong_values(wanted, cause), IsEmpty()) << cause;
}

INSTANTIATE_TEST_SUITE_P(All, FrameworkBundles, ::testing::ValuesIn(all_runs()),
                         [](const auto& tested) {
                           return tested.param.framework + "_" + tested.param.name;
                         });

TEST(FrameworkFolders, HaveAnExpectationForEachBundleAndABundleForEachExpectation) {
  ASSERT_GE(folders_in(bundles()).size(), std::size_t{20});
  for (const std::string& framework : folders_in(bundles()))
    EXPECT_THAT(unmatched(bundles() / framework), IsEmpty()) << framework;
}

TEST(FrameworkFolders, AreSmall) {
  for (const std::string& framework : folders_in(bundles()))
    EXPECT_LE(bytes_below(bundles() / framework), kMaxBytes) << framework;
}

TEST(FrameworkFolders, WithABundleOrAnExpectationTooManyAreNoticed) {
  const TestFolder folder;
  for (const char* run : {"reference", "right", "faulty_a", "faulty_b"})
    fs::create_directory(folder / run);
  std::ofstream(folder / kExpected) << R"({"options": {}, "runs": {"right": {}, "faulty_a": {},
                                          "faulty_c": {}}})";

  EXPECT_THAT(unmatched(folder.path()), ::testing::ElementsAre("faulty_b", "faulty_c"));
  fs::remove(folder / kExpected);
  EXPECT_THAT(unmatched(folder.path()), ::testing::ElementsAre(kExpected));
}

}  // namespace
}  // namespace isoshard
