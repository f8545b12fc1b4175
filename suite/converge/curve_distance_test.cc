// SPDX-License-Identifier: Apache-2.0
#include "suite/converge/curve_distance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/base/error.h"
#include "suite/converge/judge_convergence.h"
#include "suite/converge/seed_distance.h"

namespace isoshard {
namespace {

using testing::DoubleNear;
using testing::HasSubstr;
using testing::SizeIs;
using testing::ThrowsMessage;

constexpr int kSteps = 40;

/// A curve that falls from 5, with `shift` added to the loss from step `from` on.
Curve curve_of(double shift, int from = 0, double norm_factor = 1) {
  Curve curve;
  curve.subject = "fsdp_tp";
  curve.mesh = {{"dp", 1}, {"tp", 1}};
  curve.settings = R"({"dtype": "fp32"})";
  for (int t = 0; t < kSteps; ++t) {
    const double loss = 5.0 / (1 + 0.1 * t) + (t >= from ? shift : 0);
    curve.steps.push_back({t, loss, {loss}, 2 * norm_factor, 1e-3});
  }
  return curve;
}

/// A control with five perturbed runs that are up to `spread` away from it, on both sides.
PerturbedCase control_of(double spread) {
  PerturbedCase control;
  control.trained.curve = curve_of(0);
  for (const double share : {1.0, -0.5, 0.3, -0.9, 0.1})
    control.perturbed.push_back(curve_of(spread * share, 0, 1 + spread * share));
  control.trained.curve.perturbed_runs = 5;
  control.trained.curve.spreads = spreads_of(control.trained.curve, control.perturbed);
  return control;
}

CurveDistance distance(CurveNumber number, const PerturbedCase& control, const Curve& run) {
  for (const CurveDistance& d : distances_of(control.trained.curve, control.perturbed, run, {})) {
    if (d.number == number) return d;
  }
  return {};
}

TEST(CurveDistance, NumbersAreMeansOverSteps) {
  const Curve control = curve_of(0), run = curve_of(0.5, kSteps / 2, 1.25);

  EXPECT_THAT(measure(CurveNumber::kLoss, control, run, kSteps),
              DoubleNear(0.5 * std::sqrt(0.5), 1e-12));
  EXPECT_THAT(measure(CurveNumber::kLossOffset, control, run, kSteps), DoubleNear(0.25, 1e-12));
  EXPECT_THAT(measure(CurveNumber::kFinalLoss, control, run, kSteps), DoubleNear(0.5, 1e-12));
  EXPECT_THAT(measure(CurveNumber::kNorm, control, run, kSteps), DoubleNear(0.25, 1e-12));
  EXPECT_THAT(measure(CurveNumber::kNormOffset, control, run, kSteps), DoubleNear(0.25, 1e-12));
  EXPECT_EQ(measure(CurveNumber::kLoss, control, run, kSteps / 2), 0);
}

TEST(CurveDistance, OffsetSeesWhichSideAndLossDoesNot) {
  const Curve control = curve_of(0);
  Curve around = control;
  for (CurveStep& step : around.steps) step.loss += step.step % 2 == 0 ? 0.1 : -0.1;

  EXPECT_THAT(measure(CurveNumber::kLoss, control, around, kSteps), DoubleNear(0.1, 1e-12));
  EXPECT_THAT(measure(CurveNumber::kLossOffset, control, around, kSteps), DoubleNear(0, 1e-12));
}

TEST(CurveDistance, AllowsThreeTimesTheLargestOfThePerturbedRuns) {
  const PerturbedCase control = control_of(1e-2);

  const CurveDistance inside = distance(CurveNumber::kLoss, control, curve_of(0.0299)),
                      outside = distance(CurveNumber::kLoss, control, curve_of(0.0301));

  EXPECT_THAT(inside.spread, DoubleNear(1e-2, 1e-12));
  EXPECT_TRUE(inside.is_within());
  EXPECT_EQ(inside.seen_from, -1);
  EXPECT_FALSE(outside.is_within());
  EXPECT_EQ(outside.seen_from, 0);
}

TEST(CurveDistance, AllowsOneUlpOfFp32WherePerturbedRunsAgree) {
  const PerturbedCase control = control_of(0);
  const double loss = measure(CurveNumber::kLossOffset, curve_of(-5), curve_of(0), kSteps);
  ASSERT_EQ(loss, 5);
  const double unit = 0x1p-23 * 5 / (1 + 0.1 * kSteps);  // less than the mean loss

  EXPECT_TRUE(distance(CurveNumber::kLoss, control, curve_of(unit)).is_within());
  EXPECT_FALSE(distance(CurveNumber::kLoss, control, curve_of(10 * unit)).is_within());
}

TEST(CurveDistance, NeverAllowsMoreThanTheCeiling) {
  const PerturbedCase control = control_of(1);

  const CurveDistance d = distance(CurveNumber::kLoss, control, curve_of(0.06));

  EXPECT_EQ(d.allowed, CurveBounds{}.ceiling);
  EXPECT_FALSE(d.is_within());
}

TEST(CurveDistance, NothingThatTheRunSaysWidensWhatIsAllowed) {
  const PerturbedCase control = control_of(1e-5);
  Curve run = curve_of(5e-5);
  const std::vector<CurveDistance> plain =
      distances_of(control.trained.curve, control.perturbed, run, {});
  run.settings = R"({"dtype": "bf16", "autocast": "bf16"})";
  run.perturbed_runs = 100;
  run.spreads.assign(kSteps, {10, 10, 10});

  const std::vector<CurveDistance> boasting =
      distances_of(control.trained.curve, control.perturbed, run, {});
  TrainedCase trained;
  trained.curve = run;
  const ConvergenceVerdict verdict = judge_convergence(control, trained, true);

  ASSERT_EQ(boasting.size(), plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(boasting[i].allowed, plain[i].allowed);
  EXPECT_EQ(verdict.verdict.status, Status::kDiverges);
}

/// A control whose perturbed runs part in step `from`.
PerturbedCase parting_control(int from, double spread) {
  PerturbedCase control = control_of(0);
  for (std::size_t i = 0; i < control.perturbed.size(); ++i)
    control.perturbed[i] = curve_of(i % 2 == 0 ? spread : -spread, from);
  control.trained.curve.spreads = spreads_of(control.trained.curve, control.perturbed);
  return control;
}

// The runs spread by 1e-3, and three times that is more than a step of an fp32 curve may be off.
// The control's dtype decides the bounds; the dtype in the judged run's curve does not.
TEST(JudgeConvergence, BehindTheHorizonWholeCurvesAreCompared) {
  const PerturbedCase control = parting_control(30, 1e-3);
  TrainedCase near, far;
  near.curve = curve_of(9e-4, 30);
  near.curve.settings = R"({"dtype": "bf16"})";
  far.curve = curve_of(4e-3, 30);

  const ConvergenceVerdict right = judge_convergence(control, near, true),
                           wrong = judge_convergence(control, far, true);

  EXPECT_EQ(right.verdict.status, Status::kConforms) << right.verdict.reason;
  EXPECT_EQ(right.verdict.steps, 30);
  EXPECT_THAT(right.verdict.reason, HasSubstr("from step 30 on"));
  EXPECT_EQ(wrong.verdict.status, Status::kDiverges);
}

TEST(JudgeConvergence, ARateIsComparedBehindTheHorizonToo) {
  const PerturbedCase control = parting_control(30, 1e-3);
  TrainedCase run, shorter;
  run.curve = shorter.curve = curve_of(0);
  run.curve.steps[35].learning_rate *= 2;
  shorter.curve.steps.pop_back();

  EXPECT_THAT(judge_convergence(control, run, true).verdict.reason,
              HasSubstr("step 35: the learning rate must be"));
  EXPECT_THAT(judge_convergence(control, shorter, true).verdict.reason,
              HasSubstr("it has 39 steps, the control 40"));
}

TEST(JudgeConvergence, AChaoticControlShowsNothing) {
  TrainedCase run;
  run.curve = curve_of(0);

  for (const PerturbedCase& control : {parting_control(0, 1e-3), parting_control(30, 0.1)}) {
    const ConvergenceVerdict verdict = judge_convergence(control, run, true);
    EXPECT_EQ(verdict.verdict.status, Status::kVacuous);
    EXPECT_THAT(verdict.verdict.reason, HasSubstr("the case is chaotic"));
  }
  EXPECT_EQ(problem_of_control(parting_control(30, 0.02)), "");
}

TEST(CurveDistance, NanIsSeen) {
  const PerturbedCase control = control_of(1e-2);
  Curve run = curve_of(0);
  run.steps[3].loss = std::numeric_limits<double>::quiet_NaN();

  const CurveDistance d = distance(CurveNumber::kLoss, control, run);

  EXPECT_FALSE(d.is_within());
  EXPECT_EQ(d.seen_from, 3);
}

TEST(CurveDistance, ALateShiftIsSeenFromWhereItIs) {
  const PerturbedCase control = control_of(1e-3);

  EXPECT_EQ(distance(CurveNumber::kLoss, control, curve_of(1, 25)).seen_from, 25);
}

// The shift that least_shift_seen gives is judged, and a little less and a little more of it.
TEST(CurveDistance, LeastShiftIsWhereTheVerdictTurns) {
  const PerturbedCase control = control_of(1e-5);
  const double least = least_shift_seen(control.trained.curve, control.perturbed,
                                        curve_bounds(control.trained.curve));
  const auto judged = [&](double shift) {
    TrainedCase run;
    run.curve = curve_of(shift, kSteps - kSteps / 4);
    return judge_convergence(control, run, true).verdict.status;
  };

  EXPECT_GT(least, 0);
  EXPECT_EQ(judged(0.999 * least), Status::kConforms);
  EXPECT_EQ(judged(1.001 * least), Status::kDiverges);
}

TEST(CurveDistance, NeedsPerturbedRunsOfTheSameSteps) {
  Curve shorter = curve_of(0);
  shorter.steps.pop_back();
  const Curve control = curve_of(0);

  EXPECT_THAT([&] { (void)distances_of(control, {}, control, {}); },
              ThrowsMessage<UsageError>(HasSubstr("there are none")));
  EXPECT_THAT(
      [&] {
        (void)distances_of(control, {&shorter, 1}, control, {});
      },
      ThrowsMessage<UsageError>(HasSubstr("must have the 40 steps")));
}

// A dp rank has other samples where a step is cut otherwise: its own loss is not compared.
TEST(JudgeConvergence, LossesOfRanksCountOnlyWhereTheyHaveTheSameSamples) {
  const PerturbedCase control = control_of(1e-5);
  TrainedCase run;
  run.curve = curve_of(0);
  for (CurveStep& step : run.curve.steps) step.rank_losses = {step.loss + 1};

  EXPECT_EQ(judge_convergence(control, run, false).verdict.status, Status::kConforms);
  EXPECT_EQ(judge_convergence(control, run, true).verdict.status, Status::kDiverges);
}

TEST(JudgeConvergence, ARunThatDivergesIsSeenFromItsFirstStep) {
  const PerturbedCase control = control_of(1e-5);
  TrainedCase run;
  run.curve = curve_of(1, 7);

  const ConvergenceVerdict verdict = judge_convergence(control, run, true);

  EXPECT_EQ(verdict.verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.seen_from, 7);
  EXPECT_THAT(verdict.distances, SizeIs(kCurveNumbers.size()));
}

// Perturbed runs swing around their control; a run that stays on one side of it is as near in every
// step, and is none of them.
TEST(JudgeConvergence, AShiftThatNoStepShowsIsSeenOverTheWholeCurve) {
  PerturbedCase control = control_of(0);
  for (Curve& run : control.perturbed) {
    for (CurveStep& step : run.steps) {
      step.loss += step.step % 2 == 0 ? 1e-5 : -1e-5;
      step.rank_losses = {step.loss};
    }
  }
  control.trained.curve.spreads = spreads_of(control.trained.curve, control.perturbed);
  TrainedCase run, swinging;
  run.curve = curve_of(2e-5);
  swinging.curve = control.perturbed.front();
  const CurveBounds bounds = curve_bounds(control.trained.curve);
  ASSERT_EQ(judge_curve(control.trained.curve, run.curve, bounds).status, Status::kConforms);

  const ConvergenceVerdict verdict = judge_convergence(control, run, true);

  EXPECT_EQ(verdict.verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.verdict.reason, HasSubstr("its loss offset is 2.000e-05"));
  EXPECT_EQ(judge_convergence(control, swinging, true).verdict.status, Status::kConforms);
}

TEST(JudgeConvergence, UnequalCopiesDivergeWhateverTheCurveSays) {
  const PerturbedCase control = control_of(1e-5);
  TrainedCase run;
  run.curve = curve_of(0);
  ASSERT_EQ(judge_convergence(control, run, true).verdict.status, Status::kConforms);
  run.unequal_numbers = "ranks 0 and 1 report different losses";

  EXPECT_EQ(judge_convergence(control, run, true).verdict.status, Status::kDiverges);
}

// Abramowitz and Stegun, table 26.10.
TEST(SeedDistance, QuantilesAreThoseOfTheTable) {
  EXPECT_THAT(student_quantile(1, 0.05), DoubleNear(12.706, 5e-4));
  EXPECT_THAT(student_quantile(2, 0.05), DoubleNear(4.303, 5e-4));
  EXPECT_THAT(student_quantile(5, 0.01), DoubleNear(4.032, 5e-4));
  EXPECT_THAT(student_quantile(4, 0.001), DoubleNear(8.610, 5e-4));
  EXPECT_THAT(student_quantile(9, 0.001), DoubleNear(4.781, 5e-4));
}

TEST(SeedDistance, ScatterOfTheJudgedRunsDoesNotWidenWhatIsAllowed) {
  const std::vector<Curve> controls = {curve_of(0), curve_of(1e-2), curve_of(-1e-2)};
  const std::vector<Curve> close = {curve_of(2e-3), curve_of(-2e-3)},
                           scattered = {curve_of(3), curve_of(-3)};

  const std::vector<SeedDistance> right = seed_distances(controls, close),
                                  wrong = seed_distances(controls, scattered);

  ASSERT_EQ(right.size(), wrong.size());
  for (std::size_t i = 0; i < right.size(); ++i) {
    EXPECT_EQ(right[i].allowed, wrong[i].allowed);
    EXPECT_TRUE(right[i].is_within()) << right[i].number;
  }
  EXPECT_EQ(wrong[0].run, 0U);
  EXPECT_TRUE(wrong[0].is_within());  // the mean of 3 and -3
  EXPECT_FALSE(wrong[1].is_within());
}

TEST(SeedDistance, NeedsThreeControls) {
  const std::vector<Curve> two = {curve_of(0), curve_of(1)};

  EXPECT_THAT([&] { (void)seed_distances(two, two); },
              ThrowsMessage<UsageError>(HasSubstr("at least 3 seeds")));
}

}  // namespace
}  // namespace isoshard
