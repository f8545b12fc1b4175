// SPDX-License-Identifier: Apache-2.0
// What is allowed of a curve and what is not, and the published table.
#include "harness/curve/curve_judge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/base/error.h"
#include "core/base/hex_float.h"
#include "harness/curve/curve_statistics.h"
#include "harness/testing/said_matchers.h"

namespace isoshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr double kNotANumber = std::numeric_limits<double>::quiet_NaN();

Curve curve_of(const std::string& subject, const std::vector<double>& losses) {
  Curve curve;
  curve.subject = subject;
  curve.mesh = {{"dp", 2}, {"tp", 1}};
  curve.settings = R"({"dtype":"fp32","max_grad_norm":1.0,"optimizer":{"kind":"adamw"}})";
  for (const double loss : losses)
    curve.steps.push_back(
        {static_cast<int>(curve.steps.size()), loss, {loss, loss}, 2 * loss, 0.001});
  return curve;
}

/// Losses of 4, 3, 2, 1 and spreads of 0, 1e-4, 0, 0.
Curve judging_reference() {
  Curve curve = curve_of("reference", {4, 3, 2, 1});
  curve.perturbed_runs = 5;
  curve.spreads.resize(4);
  curve.spreads[1] = {1e-4, 1e-4, 1e-4};
  return curve;
}

/// The reference's curve as a subject's, with `difference` on the losses of one step.
Curve moved(int step, double difference) {
  Curve curve = curve_of("ddp", {4, 3, 2, 1});
  CurveStep& moved = curve.steps.at(static_cast<std::size_t>(step));
  moved.loss += difference;
  for (double& loss : moved.rank_losses) loss += difference;
  return curve;
}

CurveVerdict judged(const Curve& actual) {
  return judge_curve(judging_reference(), actual, {});
}

TEST(CurveJudge, EqualCurveConforms) {
  const CurveVerdict verdict = judged(moved(0, 0));

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_EQ(verdict.steps, 4);
  EXPECT_EQ(verdict.largest.deviation, 0);
  EXPECT_THAT(render(verdict), HasSubstr("CONFORMS (within tolerance)  ddp (TP=1, DP=2): 4 steps"));
}

TEST(CurveJudge, AllowsThreeTimesTheLargestSpreadUpToTheStep) {
  EXPECT_EQ(judged(moved(1, 2.9e-4)).status, Status::kConforms);
  EXPECT_EQ(judged(moved(3, 2.9e-4)).status, Status::kConforms)
      << "the spread of an earlier step counts";
  EXPECT_EQ(judged(moved(1, 3.1e-4)).status, Status::kDiverges);
  EXPECT_EQ(judged(moved(0, 2.9e-4)).status, Status::kDiverges) << "that of a later step does not";
}

TEST(CurveJudge, AllowsTheRelativeFloor) {
  EXPECT_EQ(judged(moved(0, 3.9e-6)).status, Status::kConforms);
  EXPECT_EQ(judged(moved(0, 4.1e-6)).status, Status::kDiverges);
}

TEST(CurveJudge, NeverAllowsMoreThanTheCeiling) {
  Curve wide = judging_reference();
  for (CurveSpread& spread : wide.spreads) spread = {9e-3, 9e-3, 9e-3};
  CurveBounds bounds;
  bounds.ceiling = 0.02;

  EXPECT_EQ(judge_curve(wide, moved(1, 0.019), bounds).status, Status::kConforms);
  const CurveVerdict verdict = judge_curve(wide, moved(1, 0.021), bounds);
  EXPECT_EQ(verdict.status, Status::kDiverges) << "3 x the spread is 0.027";
  EXPECT_THAT(verdict.reason, HasSubstr("the most that is ever allowed"));
}

TEST(CurveJudge, NamesTheFirstBadStepWithBothValuesInHex) {
  Curve actual = moved(2, 0.01);
  actual.steps[3].loss = 9;

  const CurveVerdict verdict = judged(actual);

  ASSERT_TRUE(verdict.first.has_value());
  EXPECT_EQ(verdict.first->step, 2);
  EXPECT_EQ(verdict.first->number, "loss");
  EXPECT_THAT(render(verdict), AllOf(HasSubstr("DIVERGES"), HasSubstr("step 2"),
                                     HasSubstr(to_hex(2.01)), HasSubstr(to_hex(2.0))));
}

TEST(CurveJudge, EveryNumberOfAStepCounts) {
  Curve rank_loss = moved(0, 0), norm = moved(0, 0), rate = moved(0, 0);
  rank_loss.steps[1].rank_losses[1] += 3.1e-4;
  norm.steps[1].grad_norm *= 1.001;
  rate.steps[1].learning_rate = 0.0010000001;

  EXPECT_THAT(judged(rank_loss).reason, HasSubstr("step 1: loss of dp rank 1"));
  EXPECT_THAT(judged(norm).reason, HasSubstr("step 1: grad_norm"));
  EXPECT_THAT(judged(rate).reason, HasSubstr("step 1: learning_rate"));
}

TEST(CurveJudge, StepsDroppedOrAddedDiverge) {
  Curve shorter = moved(0, 0), longer = moved(0, 0);
  shorter.steps.pop_back();
  longer.steps.push_back(longer.steps.back());
  longer.steps.back().step = 4;

  EXPECT_THAT(judged(shorter).reason, HasSubstr("it has 3 steps, the reference 4"));
  EXPECT_THAT(judged(longer).reason, HasSubstr("it has 5 steps, the reference 4"));
  EXPECT_EQ(judged(shorter).status, Status::kDiverges);
  EXPECT_EQ(judged(longer).status, Status::kDiverges);
}

TEST(CurveJudge, NanIsNeverAllowed) {
  for (const double bad : {kNotANumber, std::numeric_limits<double>::infinity()}) {
    Curve loss = moved(0, 0), norm = moved(0, 0);
    loss.steps[3].loss = bad;
    norm.steps[3].grad_norm = bad;
    EXPECT_EQ(judged(loss).status, Status::kDiverges) << bad;
    EXPECT_EQ(judged(norm).status, Status::kDiverges) << bad;
  }
  Curve broken = judging_reference();
  broken.steps[2].loss = kNotANumber;
  EXPECT_EQ(judge_curve(broken, moved(2, kNotANumber), {}).status, Status::kVacuous)
      << "the reference's own loss is no number";
}

TEST(CurveJudge, ChaoticReferenceIsVacuousWithTheNumbers) {
  Curve chaotic = judging_reference();
  chaotic.spreads[2].loss = 0.021;  // 1.05 % of 2

  const CurveVerdict verdict = judge_curve(chaotic, moved(0, 0), {});

  EXPECT_EQ(verdict.status, Status::kVacuous);
  EXPECT_THAT(verdict.reason, AllOf(HasSubstr("chaotic"), HasSubstr("step 2"), HasSubstr("0.021"),
                                    HasSubstr("1.1 %")));
  chaotic.spreads[2].loss = 0.0101;  // 0.5 % of the loss of its own step, 1.01 % of the last one
  EXPECT_THAT(judge_curve(chaotic, moved(0, 0), {}).reason,
              AllOf(HasSubstr("chaotic"), HasSubstr("by step 3")));
  chaotic.spreads[2].loss = 0.0099;  // 0.99 % of the last loss, and less of the others
  EXPECT_EQ(judge_curve(chaotic, moved(0, 0), {}).status, Status::kConforms);
}

TEST(CurveJudge, WithoutPerturbedRunsEveryBitCounts) {
  Curve plain = judging_reference();
  plain.perturbed_runs = 0;
  plain.spreads.clear();
  const double ulp = std::nextafter(4.0, 5.0) - 4.0;

  EXPECT_EQ(judge_curve(plain, moved(0, 0), {}).status, Status::kConforms);
  EXPECT_EQ(judge_curve(plain, moved(0, ulp), {}).status, Status::kDiverges);
  CurveBounds bounds;
  bounds.rtol = 1e-3;
  EXPECT_EQ(judge_curve(plain, moved(0, 3.9e-3), bounds).status, Status::kConforms);
  EXPECT_EQ(judge_curve(plain, moved(0, 4.1e-3), bounds).status, Status::kDiverges);
}

TEST(CurveJudge, SpreadIsTheLargestDifferenceOfAnyRun) {
  const std::vector<Curve> runs = {moved(1, 1e-3), moved(1, -2e-3), moved(3, 5e-4)};

  const std::vector<CurveSpread> spreads = spreads_of(judging_reference(), runs);

  EXPECT_NEAR(spreads[1].loss, 2e-3, 1e-12);
  EXPECT_NEAR(spreads[3].loss, 5e-4, 1e-12);
  EXPECT_EQ(spreads[0].loss, 0);
  Curve shorter = moved(0, 0);
  shorter.steps.pop_back();
  EXPECT_THAT([&] { (void)spreads_of(judging_reference(), {shorter}); },
              RefusesBy<UsageError>(RuleId::kPerturbedCurveSteps));
}

TEST(CurveSettings, DifferencesAreRefusedByNameAndValue) {
  Curve actual = moved(0, 0);
  EXPECT_THAT(differing_settings(judging_reference(), actual), IsEmpty());
  EXPECT_NO_THROW(refuse_different_settings(judging_reference(), actual));
  actual.settings = R"({"dtype":"fp32","max_grad_norm":0.0,"optimizer":{"kind":"adamw"}})";

  try {
    refuse_different_settings(judging_reference(), actual);
    FAIL() << "not refused";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("max_grad_norm: reference 1.0, actual 0.0"),
                                    HasSubstr("--allow-different-settings")));
  }
}

// Whatever the settings say of where they come from.
TEST(CurveSettings, OtherInitialWeightsOrBatchesAreRefused) {
  for (const auto& [key, words] :
       {std::pair{kInitialWeightsKey, "initial weights differ: reference aaaa, actual bbbb"},
        std::pair{kBatchesKey, "token ids and labels differ: reference aaaa, actual bbbb"}}) {
    Curve first = judging_reference(), second = moved(0, 0);
    first.fingerprint[std::string(key)] = "aaaa";
    EXPECT_THAT(differing_settings(second, first), IsEmpty()) << "the reference does not say";
    EXPECT_THAT(differing_settings(first, second),
                testing::ElementsAre(HasSubstr("actual does not say")));
    second.fingerprint[std::string(key)] = "aaaa";
    EXPECT_THAT(differing_settings(first, second), IsEmpty());
    second.fingerprint[std::string(key)] = "bbbb";

    EXPECT_THAT(differing_settings(first, second), testing::ElementsAre(HasSubstr(words)));
    EXPECT_THAT([&] { refuse_different_settings(first, second); },
                RefusesBy<UsageError>(RuleId::kCurveSettingsDiffer));
  }
}

TEST(CurveJudge, SaysThatAStepWasSkippedOnOneSide) {
  Curve skipping = moved(0, 0);
  skipping.steps[2].grad_norm = 0;
  EXPECT_THAT(judged(skipping).reason, testing::Not(HasSubstr("skipped")));
  skipping.settings = R"({"dtype":"fp16","loss_scale":{"kind":"dynamic"}})";

  EXPECT_THAT(judged(skipping).reason,
              AllOf(HasSubstr("step 2: grad_norm is 0"), HasSubstr("the run skipped this step")));
}

TEST(CurveStatistics, TableIsThePublishedOne) {
  Curve ddp = curve_of("ddp", {10.873175, 0.72359, 4.644855}),
        fsdp = curve_of("fsdp_tp", {10.873634, 0.723624, 4.644554});
  ddp.title = "DDP";
  fsdp.title = "FSDP+DTensor";
  fsdp.mesh["tp"] = 2;

  const std::string table = statistics_table(std::vector<Curve>{fsdp, ddp});

  EXPECT_EQ(table, R"(============================================================
LOSS CURVE STATISTICS
============================================================

DDP (TP=1, DP=2):
  Initial loss: 10.873175
  Final loss:   4.644855
  Min loss:     0.723590
  Mean loss:    5.413873

FSDP+DTensor (TP=2, DP=2):
  Initial loss: 10.873634
  Final loss:   4.644554
  Min loss:     0.723624
  Mean loss:    5.413937

------------------------------------------------------------
Differences from DDP baseline:

FSDP+DTensor (TP=2, DP=2):
  Max abs diff:  0.000459
  Mean abs diff: 0.000265
  Final diff:    -0.000301
)");
}

TEST(CurveStatistics, SmallDifferencesAreNotShownAsZero) {
  const std::string table = statistics_table(
      std::vector<Curve>{curve_of("ddp", {2, 1}), curve_of("autotp", {2, 1 - 3e-8})});
  const std::string equal =
      statistics_table(std::vector<Curve>{curve_of("ddp", {2, 1}), curve_of("autotp", {2, 1})});

  EXPECT_THAT(table,
              AllOf(HasSubstr("Max abs diff:  3.00e-08\n"), HasSubstr("Mean abs diff: 1.50e-08\n"),
                    HasSubstr("Final diff:    -3.00e-08\n")));
  EXPECT_THAT(equal, AllOf(HasSubstr("Max abs diff:  0\n"), HasSubstr("Mean abs diff: 0\n"),
                           HasSubstr("Final diff:    0\n")));
}

TEST(CurveStatistics, NanIsSeen) {
  const std::string table = statistics_table(
      std::vector<Curve>{curve_of("ddp", {2, 1}), curve_of("autotp", {2, kNotANumber})});

  EXPECT_THAT(table, AllOf(HasSubstr("Min loss:     nan"), HasSubstr("Max abs diff:  nan"),
                           HasSubstr("Mean abs diff: nan")));
}

TEST(CurveStatistics, CurvesOfDifferentLengthSaySo) {
  const std::string table =
      statistics_table(std::vector<Curve>{curve_of("ddp", {2, 1}), curve_of("autotp", {2, 1, 0})});

  EXPECT_THAT(table, HasSubstr("(over the first 2 steps: it has 3, the baseline 2)"));
}

TEST(CurveStatistics, BaselineIsDdpElseTheReferenceElseTheFirst) {
  const Curve a = curve_of("autotp", {1}), d = curve_of("ddp", {1}), r = curve_of("reference", {1});
  EXPECT_EQ(baseline_of(std::vector<Curve>{a, r, d}).subject, "ddp");
  EXPECT_EQ(baseline_of(std::vector<Curve>{a, r}).subject, "reference");
  EXPECT_EQ(baseline_of(std::vector<Curve>{a}).subject, "autotp");
}

}  // namespace
}  // namespace isoshard
