// SPDX-License-Identifier: Apache-2.0
// The same as tests: runs that conform, and a fault that must be found.
#include <gtest/gtest.h>

#include "harness/fault/collective_fault.h"
#include "harness/report/formats/report_formats.h"
#include "harness/verify/verify_runs.h"
#include "own_mlp.h"

using namespace isoshard;

TEST(OwnMlp, ConformsOnTwoAndFourRanks) {
  const Report report =
      verify_runs({.reference = own::mlp_run(1), .runs = {own::mlp_run(2), own::mlp_run(4)}});

  EXPECT_EQ(report.exit_code, kExitConforms) << text_of(report);
}

TEST(OwnMlp, DivergesWithoutTheSumOfItsForwardPass) {
  RunPlan plan{.reference = own::mlp_run(1), .runs = {own::mlp_run(2)}};
  plan.fault = {"lost_sum", skip_calls(Purpose::kRowParallelForward, Axis::kTp)};

  const Report report = verify_runs(plan);

  EXPECT_EQ(report.exit_code, kExitDiverges) << text_of(report);
}
