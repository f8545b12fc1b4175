// SPDX-License-Identifier: Apache-2.0
/// The course of a test program with ranks.
#include "harness/testing/test_program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "harness/golden/golden_mode.h"
#include "harness/testing/attached_tests.h"
#include "harness/testing/run_world.h"
#include "harness/world/end_process.h"
#include "harness/world/interrupt.h"
#include "harness/world/warm_up.h"

namespace isoshard {
namespace {

/// GoogleTest shares tests out over several runs of a program: both variables are set.
bool is_shard() {
  return std::getenv("GTEST_TOTAL_SHARDS") != nullptr &&
         std::getenv("GTEST_SHARD_INDEX") != nullptr;
}

// GoogleTest takes these from the environment too, runs fewer tests or none, and calls that a
// success. ctest's entries are whole suites (ISOSHARD_WHOLE_SUITE), of which no shard may be left
// out.
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

}  // namespace

int run_test_program(int argc, char** argv, const AttachJob& attach_job) {
  constexpr int kNothingRan = 2, kWrongLabels = 3;
  if (const char* const name = variable_that_leaves_tests_out(); name != nullptr) {
    std::fprintf(stderr, "%s is set in the environment: tests would be left out unseen; unset it\n",
                 name);
    return kNothingRan;
  }
  if (!set_golden_mode(argc, argv)) return kNothingRan;
  make_controller();
  install_interrupt_handler();
  const KeepResults keep_results;  // a report of the tests so far
  join_gtest_to_worlds();
  std::unique_ptr<AttachedTests> attached;
  try {
    attached = AttachedTests::join(argc, argv, attach_job);
    ::testing::InitGoogleMock(&argc, argv);
    if (attached != nullptr) attached->prepare();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return kNothingRan;
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
  const std::string problem = world_sizes_problem(declared);
  if (!problem.empty())
    std::fprintf(stderr, "the labels of this suite are wrong: %s\n", problem.c_str());
  return problem.empty() ? 0 : kWrongLabels;
}

}  // namespace isoshard
