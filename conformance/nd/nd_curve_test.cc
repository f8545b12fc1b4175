// SPDX-License-Identifier: Apache-2.0
// A pipeline with context parallelism trains as one process does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "suite/testing/nd_cases.h"
#include "suite/train/train_case.h"

namespace isoshard {
namespace {

// Only the last stage knows the loss of a dp rank: the curve has each once.
TEST(NdCurve, HasTheLossOfEveryDpRank) {
  Case item = in_pipeline(nd_case({.pp = 2, .dp = 2, .cp = 2}));
  item.steps = 3;

  const TrainedCase trained = train_case(item, {});

  EXPECT_EQ(trained.unequal_numbers, "");
  ASSERT_EQ(trained.curve.steps.size(), 3U);
  for (const CurveStep& step : trained.curve.steps) EXPECT_EQ(step.rank_losses.size(), 2U);
  EXPECT_EQ(trained.curve.mesh.at("pp"), 2);
  EXPECT_EQ(trained.curve.mesh.at("cp"), 2);
}

}  // namespace
}  // namespace isoshard
