// SPDX-License-Identifier: Apache-2.0
// Test sets converge as their control does; wrong ones are seen, with the step from which.
#include "suite/converge/converge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/base/error.h"
#include "suite/converge/converge_presets.h"
#include "suite/converge/converge_report.h"
#include "suite/faults/fault.h"

namespace isoshard {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

/// A few steps of two layers on 32 tokens a sample, two perturbed runs.
ConvergePlan plan_of(const std::vector<std::string>& tests, int steps = 6, int dp = 2) {
  ConvergePlan plan;
  plan.control = preset_control(find_converge_preset("fsdp"));
  use_scaled_llama3(plan.control, 2);
  plan.control.degrees.dp = dp;
  plan.control.seq_length = 32;
  plan.control.steps = steps;
  plan.control.settings.schedule.warmup_steps = 1;
  plan.check = small_check(plan.control);
  plan.seeds = {0};
  plan.perturbed_runs = 2;
  plan.check_interval = 3;
  for (const std::string& text : tests) plan.sets.push_back(test_set(text, plan.control));
  return plan;
}

ConvergeResult run(const ConvergePlan& plan) {
  TrainObserver observer;
  return converge(plan, observer);
}

TEST(Converge, TestSetsOfEveryAxisConvergeAsTheirControl) {
  const ConvergePlan plan = plan_of({"tp=2,cp=2", "pp=2,recompute", "tp=2,vocab-parallel"});
  ASSERT_EQ(plan.control.world_size(), 2);
  ASSERT_EQ(plan.sets[0].item.world_size(), 8);

  const ConvergeResult result = run(plan);

  EXPECT_EQ(result.report.exit_code, 0) << convergence_text(plan, result);
  EXPECT_EQ(result.check.status, Status::kConforms) << result.check.reason;
  ASSERT_THAT(result.runs, SizeIs(3));
  for (const ConvergeRun& item : result.runs) {
    ASSERT_TRUE(item.judged.has_value()) << item.failure;
    EXPECT_EQ(item.judged->verdict.status, Status::kConforms) << item.judged->verdict.reason;
    EXPECT_THAT(item.judged->distances, SizeIs(kCurveNumbers.size()));
    EXPECT_GT(item.judged->distances.front().value, 0) << "the run is its control, bit by bit";
  }
}

TEST(Converge, EverySeedHasItsOwnControl) {
  ConvergePlan plan = plan_of({"cp=2"}, 3);
  plan.seeds = {0, 7};

  const ConvergeResult result = run(plan);

  EXPECT_EQ(result.report.exit_code, 0) << convergence_text(plan, result);
  ASSERT_THAT(result.controls, SizeIs(2));
  ASSERT_THAT(result.runs, SizeIs(2));
  EXPECT_NE(result.controls[0].runs.trained.curve.steps[0].loss,
            result.controls[1].runs.trained.curve.steps[0].loss);
  EXPECT_THAT(convergence_text(plan, result), HasSubstr("FSDP 2, CP 2, seed 7"));
}

TEST(Converge, OtherSeedsAreComparedOverSeedsOnTheSameSamples) {
  ConvergePlan plan = plan_of({"cp=2"}, 4);
  plan.seeds = {0, 1, 2};
  plan.test_seeds = {3, 4};

  const ConvergeResult result = run(plan);

  EXPECT_EQ(result.report.exit_code, 0) << convergence_text(plan, result);
  ASSERT_THAT(result.controls, SizeIs(3));
  ASSERT_THAT(result.runs, SizeIs(2));
  const auto batches = [](const Curve& curve) {
    return curve.fingerprint.at(std::string(kBatchesKey));
  };
  const auto weights = [](const Curve& curve) {
    return curve.fingerprint.at(std::string(kInitialWeightsKey));
  };
  const Curve &control = result.controls[1].runs.trained.curve, &test = result.runs[0].curve;
  EXPECT_EQ(batches(control), batches(test));
  EXPECT_NE(weights(control), weights(test));
  EXPECT_THAT(result.runs[0].judged->over_seeds, SizeIs(4));
}

/// The step from which the run of the only set is seen to diverge.
int seen_from(ConvergePlan plan, const std::string& fault) {
  plan.fault = fault;
  const ConvergeResult result = run(plan);
  EXPECT_EQ(result.report.exit_code, 1) << convergence_text(plan, result);
  EXPECT_EQ(result.check.status, Status::kConforms);
  if (result.runs.size() != 1 || !result.runs[0].judged.has_value()) return -1;
  EXPECT_EQ(result.runs[0].judged->verdict.status, Status::kDiverges);
  EXPECT_THAT(convergence_text(plan, result), HasSubstr("DIVERGES, seen from step"));
  return result.runs[0].judged->seen_from;
}

// All gradients are twice too large: clipping hides it from the loss, and the norm tells.
TEST(ConvergeControl, AWrongDivisorByCpIsSeenInTheFirstStep) {
  EXPECT_EQ(seen_from(plan_of({"cp=2"}), "cp_divisor_missing"), 0);
}

// Each stage clips by the norm of its own weights.
TEST(ConvergeControl, AStageThatSkipsItsSumIsSeenInTheFirstStep) {
  EXPECT_EQ(seen_from(plan_of({"pp=2"}), "clip_norm_per_stage"), 0);
}

TEST(ConvergeControl, AFaultThatCannotActIsNoPass) {
  ConvergePlan plan = plan_of({"tp=2"}, 2);
  plan.fault = "cp_divisor_missing";

  const ConvergeResult result = run(plan);

  EXPECT_EQ(result.report.exit_code, 4);
  ASSERT_THAT(result.runs, SizeIs(1));
  EXPECT_FALSE(result.runs[0].judged.has_value());
}

// A technique's control is 1D FSDP without it: gradients that are averaged in bf16 are another
// computation than those of the fp32 control.
TEST(ConvergeControl, GradientsAveragedInBf16AreSeenBesideAnFp32Control) {
  const int step = seen_from(plan_of({"cp=2,reduce-dtype=bf16"}), "");

  EXPECT_GE(step, 0);
  EXPECT_LE(step, 1);
}

// What upstream's context parallelism does under mixed precision, at its largest degree here.
TEST(ConvergeRing, AMergeInBf16OverCp8IsSeenAndOneInFp32IsNot) {
  const ConvergePlan right = plan_of({"cp=8,context-attention=ring"}, 4, 1),
                     wrong = plan_of({"cp=8,context-attention=ring,ring-merge-dtype=bf16"}, 4, 1);
  ASSERT_EQ(right.sets[0].item.world_size(), 8);

  const ConvergeResult result = run(right);
  const int step = seen_from(wrong, "");

  EXPECT_EQ(result.report.exit_code, 0) << convergence_text(right, result);
  EXPECT_EQ(step, 0);
}

}  // namespace
}  // namespace isoshard
