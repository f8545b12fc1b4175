// SPDX-License-Identifier: Apache-2.0
/// The course of a test program with ranks.
#include "harness/testing/test_program.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "harness/golden/golden_mode.h"
#include "harness/testing/attached_tests.h"
#include "harness/testing/run_world.h"
#include "harness/testing/test_folder.h"
#include "harness/world/end_process.h"
#include "harness/world/interrupt.h"

namespace isoshard {
namespace {

/// GoogleTest shares tests out over several runs of a program: both variables are set.
bool is_shard() {
  return std::getenv("GTEST_TOTAL_SHARDS") != nullptr &&
         std::getenv("GTEST_SHARD_INDEX") != nullptr;
}

// GoogleTest takes these from the environment too, runs fewer tests or none, and calls that a
// success. Most entries of ctest are whole suites (ISOSHARD_WHOLE_SUITE), of which no shard may be
// left out; those that run a share of a suite set both variables themselves.
const char* variable_that_leaves_tests_out() {
  for (const char* name :
       {"GTEST_LIST_TESTS", "GTEST_REPEAT", "GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) {
    const bool is_of_shards = std::string_view(name).find("SHARD") != std::string_view::npos;
    if (std::getenv(name) == nullptr) continue;
    if (is_of_shards && is_shard() && std::getenv("ISOSHARD_WHOLE_SUITE") == nullptr) continue;
    return name;
  }
  return nullptr;
}

// `--golden=record` is for whole programs and for `ISOSHARD_GOLDEN=record ctest -L golden`. False
// if it is refused.
bool set_golden_mode(int& argc, char** argv) {
  try {
    if (take_golden_mode(argc, argv))
      std::fputs(
          "goldens are recorded, not checked; isoshard golden review shows what is pending\n",
          stderr);
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return false;
  }
}

// The name that isoshard_test() lists: of "Cases/Sums/0", "Sums".
std::string_view listed_name(std::string_view suite) {
  const auto tail = [](std::string_view text) { return text.substr(text.rfind('/') + 1); };
  if (suite.find('/') != std::string_view::npos &&
      tail(suite).find_first_not_of("0123456789") == std::string_view::npos)
    suite.remove_suffix(tail(suite).size() + 1);
  return tail(suite);
}

// ctest sets ISOSHARD_LISTED_SUITES to all suites that its entries of this program run: one that is
// not among them would never run. Empty if they are the suites of this program.
std::string suites_problem(std::string_view listed) {
  std::set<std::string_view> unlisted, unfound;
  while (!listed.empty()) {
    unfound.insert(listed.substr(0, listed.find(',')));
    listed.remove_prefix(std::min(listed.size(), listed.find(',')));
    listed.remove_prefix(listed.empty() ? 0 : 1);
  }
  const std::set<std::string_view> all = unfound;
  const ::testing::UnitTest& program = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < program.total_test_suite_count(); ++i) {
    const std::string_view suite = listed_name(program.GetTestSuite(i)->name());
    if (!all.contains(suite)) unlisted.insert(suite);
    unfound.erase(suite);
  }
  if (unlisted.empty() && unfound.empty()) return "";
  return fmt::format("not listed: '{}'; listed but not there: '{}'", fmt::join(unlisted, ","),
                     fmt::join(unfound, ","));
}

// The temporary folder of this process and of all that it starts, removed at the end: this program
// destroys no global object, and what a test kills cleans up nothing.
class OwnTemporaryFolder {
 public:
  OwnTemporaryFolder() {
    // also for those whom a test turns into another user
    std::filesystem::permissions(folder_.path(), std::filesystem::perms::all);
    ::setenv("TMPDIR", folder_.path().c_str(), /*overwrite=*/1);
  }

 private:
  TestFolder folder_;
};

}  // namespace

int run_test_program(int argc, char** argv, const AttachJob& attach_job) {
  constexpr int kNothingRan = 2, kWrongLabels = 3;
  if (const char* const name = variable_that_leaves_tests_out(); name != nullptr) {
    std::fprintf(stderr, "%s is set in the environment: tests would be left out unseen; unset it\n",
                 name);
    return kNothingRan;
  }
  if (!set_golden_mode(argc, argv)) return kNothingRan;
  install_interrupt_handler();
  const KeepResults keep_results;  // a report of the tests so far
  std::unique_ptr<AttachedTests> attached;
  std::optional<OwnTemporaryFolder> temporary;
  try {
    attached = AttachedTests::join(argc, argv, attach_job);
    if (attached == nullptr) temporary.emplace();  // MPI has its own files in the common one
    ::testing::InitGoogleMock(&argc, argv);
    if (attached != nullptr) attached->prepare();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return kNothingRan;
  }
  if (const char* const suites = std::getenv("ISOSHARD_LISTED_SUITES"); suites != nullptr) {
    if (const std::string problem = suites_problem(suites); !problem.empty()) {
      std::fprintf(stderr, "SUITES of this program's isoshard_test() must be its suites: %s\n",
                   problem.c_str());
      return kWrongLabels;
    }
  }
  int result = RUN_ALL_TESTS();
  if (attached != nullptr) result = attached->finish(result);
  if (const int signal = interrupt_signal(); signal != 0) return 128 + signal;
  if (result == 0 && !GTEST_FLAG_GET(list_tests) && !is_shard() &&
      ::testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    std::fputs("no test was selected: look at --gtest_filter\n", stderr);
    return kNothingRan;
  }
  // ctest sets it from a suite's labels world2, world3, ...: they must be true. A single test is
  // not the whole suite.
  const char* const declared = std::getenv("ISOSHARD_WORLD_SIZES");
  if (result != 0 || declared == nullptr || GTEST_FLAG_GET(list_tests)) return result;
  const std::string problem = world_sizes_problem(declared, is_shard());
  if (!problem.empty())
    std::fprintf(stderr, "the labels of this suite are wrong: %s\n", problem.c_str());
  return problem.empty() ? 0 : kWrongLabels;
}

}  // namespace isoshard
