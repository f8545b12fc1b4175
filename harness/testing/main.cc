// SPDX-License-Identifier: Apache-2.0
/// The main of every test program that runs ranks: the program is the controller of forked worlds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "harness/golden/golden_mode.h"
#include "harness/testing/run_world.h"
#include "harness/world/end_process.h"
#include "harness/world/interrupt.h"
#include "harness/world/warm_up.h"

namespace {

// GoogleTest takes these from the environment too, runs fewer tests or none, and calls that a
// success.
const char* variable_that_leaves_tests_out() {
  for (const char* name :
       {"GTEST_LIST_TESTS", "GTEST_REPEAT", "GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX"}) {
    if (std::getenv(name) != nullptr) return name;
  }
  return nullptr;
}

// `--golden=record` is for whole programs and for `ISOSHARD_GOLDEN=record ctest -L golden`. False
// if it is refused.
bool set_golden_mode(int& argc, char** argv) {
  try {
    if (isoshard::take_golden_mode(argc, argv))
      std::fputs(
          "goldens are recorded, not checked; isoshard golden review shows what is pending\n",
          stderr);
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return false;
  }
}

int run(int argc, char** argv) {
  constexpr int kNothingRan = 2, kWrongLabels = 3;
  if (const char* const name = variable_that_leaves_tests_out(); name != nullptr) {
    std::fprintf(stderr, "%s is set in the environment: tests would be left out unseen; unset it\n",
                 name);
    return kNothingRan;
  }
  if (!set_golden_mode(argc, argv)) return kNothingRan;
  isoshard::make_controller();
  isoshard::install_interrupt_handler();
  const isoshard::KeepResults keep_results;  // a report of the tests so far
  isoshard::join_gtest_to_worlds();
  ::testing::InitGoogleMock(&argc, argv);
  const int result = RUN_ALL_TESTS();
  if (const int signal = isoshard::interrupt_signal(); signal != 0) return 128 + signal;
  if (result == 0 && !GTEST_FLAG_GET(list_tests) &&
      ::testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    std::fputs("no test was selected: look at --gtest_filter\n", stderr);
    return kNothingRan;
  }
  // ctest sets it from a suite's labels world2, world3, ...: they must be true. A single test is
  // not the whole suite.
  const char* const declared = std::getenv("ISOSHARD_WORLD_SIZES");
  if (result != 0 || declared == nullptr || GTEST_FLAG_GET(list_tests)) return result;
  const std::string problem = isoshard::world_sizes_problem(declared);
  if (!problem.empty())
    std::fprintf(stderr, "the labels of this suite are wrong: %s\n", problem.c_str());
  return problem.empty() ? 0 : kWrongLabels;
}

}  // namespace

int main(int argc, char** argv) {
  isoshard::end_process(run(argc, argv));
}
