// SPDX-License-Identifier: Apache-2.0
/// The main of every test program that runs ranks: the program is the controller of forked worlds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>

#include "harness/testing/run_world.h"
#include "harness/world/interrupt.h"
#include "harness/world/warm_up.h"

int main(int argc, char** argv) {
  constexpr int kNothingRan = 2;
  isoshard::make_controller();
  isoshard::install_interrupt_handler();
  isoshard::join_gtest_to_worlds();
  ::testing::InitGoogleMock(&argc, argv);
  const int result = RUN_ALL_TESTS();
  if (const int signal = isoshard::interrupt_signal(); signal != 0) return 128 + signal;
  if (result == 0 && !GTEST_FLAG_GET(list_tests) && ::testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    std::fputs("no test was selected: look at --gtest_filter\n", stderr);
    return kNothingRan;
  }
  return result;
}
