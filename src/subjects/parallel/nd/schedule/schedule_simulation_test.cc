// SPDX-License-Identifier: Apache-2.0
// Times of schedules against the formulas of their papers.
#include "subjects/parallel/nd/schedule/schedule_simulation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "core/base/error.h"
#include "subjects/parallel/nd/schedule/every_schedule.h"
#include "subjects/parallel/nd/schedule/schedule_text.h"

namespace isoshard {
namespace {

using enum PipelineKind;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Powers of two, so that all sums are exact.
constexpr ActionCosts kCosts{
    .forward = 1, .backward = 2, .backward_input = 1, .backward_weight = 1};

TEST(PipelineTime, OfGPipeAnd1F1BIsTheFormula) {
  int cases = 0;
  for (const PipelineSpec& spec : every_spec()) {
    if (spec.kind != kGPipe && spec.kind != k1F1B) continue;
    ++cases;

    const PipelineTiming time = timing(make_schedule(spec), kCosts);

    EXPECT_EQ(time.makespan, 3 * (spec.micro_batches + spec.pp - 1)) << slug(spec);
    EXPECT_EQ(time.ideal, 3 * spec.micro_batches) << slug(spec);
    EXPECT_DOUBLE_EQ(time.bubble_share, (spec.pp - 1.0) / (spec.micro_batches + spec.pp - 1.0))
        << slug(spec);
  }
  EXPECT_GT(cases, 200);
}

TEST(PipelineTime, OfInterleaved1F1BIsTheFormulaForWholeRounds) {
  int cases = 0;
  for (const PipelineSpec& spec : every_spec()) {
    if (spec.kind != kInterleaved1F1B || spec.placement != StagePlacement::kLoop ||
        spec.micro_batches % spec.pp != 0)
      continue;
    ++cases;
    EXPECT_EQ(timing(make_schedule(spec), kCosts).makespan,
              3 * (spec.stages_per_rank * spec.micro_batches + spec.pp - 1))
        << slug(spec);
  }
  EXPECT_GT(cases, 80);
}

TEST(PipelineTime, OfZeroBubbleHasAThirdOfTheBubbleOf1F1B) {
  // Qi et al. 2023, table 2: the bubble of ZB-H1 is (pp - 1) (F + I - W), that of 1F1B
  // (pp - 1) (F + I + W).
  for (const int pp : {1, 2, 4, 8}) {
    const PipelineSpec spec{kInterleavedZeroBubble, pp, 1, StagePlacement::kLoop, 16};
    EXPECT_EQ(timing(make_schedule(spec), kCosts).makespan, 3 * 16 + pp - 1) << slug(spec);
  }
}

TEST(PipelineTime, OfZbvHasNoBubbleButTheWayDown) {
  // With F = I = W a rank is idle for the way down to it and the way back at the end: pp - 1 steps.
  for (const int pp : {1, 2, 4}) {
    const PipelineSpec spec{kZbvZeroBubble, pp, 2, StagePlacement::kV, 16};
    EXPECT_EQ(timing(make_schedule(spec), kCosts).makespan, 2 * 3 * 16 + pp - 1) << slug(spec);
  }
}

TEST(PipelineTime, IsNeverBelowTheIdealNorThePathOfOneMicroBatch) {
  for (const PipelineSpec& spec : every_spec()) {
    const PipelineTiming time = timing(make_schedule(spec), kCosts);
    EXPECT_EQ(time.ideal, 3 * spec.stages_per_rank * spec.micro_batches) << slug(spec);
    EXPECT_GE(time.makespan, time.ideal) << slug(spec);
    EXPECT_GE(time.makespan, 2 * num_stages(spec)) << slug(spec);
  }
}

TEST(PipelineTime, CountsTransfersBetweenRanksOnly) {
  const ActionCosts costs{.forward = 1, .backward = 2, .transfer = 0.5};
  const PipelineSpec loop{kInterleaved1F1B, 2, 2, StagePlacement::kLoop, 1};
  const PipelineSpec v{kInterleaved1F1B, 2, 2, StagePlacement::kV, 1};

  EXPECT_EQ(timing(make_schedule(loop), costs).makespan, 4 * 3 + 6 * 0.5);
  EXPECT_EQ(timing(make_schedule(v), costs).makespan, 4 * 3 + 4 * 0.5);
  EXPECT_THAT(timing(make_schedule(v), costs).work, ElementsAre(6, 6));
}

TEST(PipelineTime, RefusesCostsThatAreNone) {
  const PipelineSchedule schedule = make_schedule({});
  EXPECT_THROW((void)timing(schedule, {.forward = -1}), UsageError);
  EXPECT_THROW((void)timing(schedule, {.transfer = std::numeric_limits<double>::quiet_NaN()}),
               UsageError);
  EXPECT_EQ(timing(schedule, {.forward = 0, .backward = 0}).bubble_share, 0);
}

TEST(PipelineAligned, PutsActionsAtTheirEarliestTimeSteps) {
  const PipelineSpec spec{k1F1B, 2, 1, StagePlacement::kLoop, 2};
  const PipelineSchedule packed = schedule_from_csv(spec, "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "");
  const PipelineSchedule spread =
      schedule_from_csv(spec, "0F0,,,,,0F1,0B0,,0B1\n,1F0,1B0,1F1,1B1\n", "");

  EXPECT_EQ(csv_of(aligned(packed)), "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n");
  EXPECT_EQ(aligned(spread).table, aligned(packed).table);
}

TEST(PipelineAligned, RefusesWhatNeverRuns) {
  const PipelineSpec spec{k1F1B, 2, 1, StagePlacement::kLoop, 1};
  try {
    (void)aligned(schedule_from_csv(spec, "0B0,0F0\n1F0,1B0\n", ""));
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("rank 0, time step 0, 0B0 waits for 0F0, which never runs"));
  }
}

}  // namespace
}  // namespace isoshard
