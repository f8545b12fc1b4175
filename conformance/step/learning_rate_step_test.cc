// SPDX-License-Identifier: Apache-2.0
// Steps under a schedule: the optimizer takes the step's rate, and the rate is compared exactly.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/tensor/convert.h"
#include "harness/judge/judge.h"
#include "suite/testing/emulated_cases.h"

namespace isoshard {
namespace {

using RateKind = LearningRateSettings::Kind;

Case scheduled(Case item, const LearningRateSettings& schedule, bool adamw) {
  if (adamw) item.settings.optimizer = OptimizerSettings{};
  item.settings.schedule = schedule;
  item.steps = 4;
  return item;
}

class LearningRateStep : public ::testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(
    Schedules, LearningRateStep,
    ::testing::Values(
        scheduled(step_case("ddp", {.dp = 3}), {RateKind::kCosine, 1, 0, 0.01}, false),
        scheduled(step_case("autotp", {.dp = 3, .tp = 2}), {RateKind::kLinear, 2, 0, 0}, false),
        scheduled(step_case("autotp", {.dp = 3, .tp = 2}, Dtype::kBFloat16),
                  {RateKind::kCosine, 1, 8, 0}, true),
        scheduled(step_case("ddp", {.dp = 3}), {RateKind::kConstant, 3, 0, 0}, true)),
    case_name);

TEST_P(LearningRateStep, IsBitEqualToItsEmulatedReferenceAndRecordsTheRate) {
  const Case& item = GetParam();
  const LearningRate rate(item.settings.optimizer.learning_rate, item.learning_rate_schedule());
  const Reference reference = make_emulated_reference(item, numerics_of(item));

  const Trace actual = run_case(item, reference);

  EXPECT_THAT(actual, conforms_to(reference, exact_policy_of(item)));
  for (int step = 0; step < item.steps; ++step) {
    const RecordKey key{step, RecordKind::kScalar, "learning_rate", 0};
    EXPECT_EQ(tensor_of(reference.tensor(key)).item<double>(), rate.at(step)) << step;
  }
  EXPECT_NE(rate.at(0), rate.at(3)) << "the schedule does nothing";
}

// At rate 0, the first step of a warm-up, parameters stay; at the rate of the settings they would
// not.
TEST(LearningRateStep, TheFirstStepOfAWarmUpMovesNothing) {
  Case item = scheduled(step_case("autotp", {}), {RateKind::kConstant, 2, 0, 0}, false);
  const Reference& reference = reference_of(item);
  const RecordKey read{0, RecordKind::kParam, "model.norm.weight", 0},
      after{0, RecordKind::kParam, "model.norm.weight", 1},
      later{1, RecordKind::kParam, "model.norm.weight", 0};

  EXPECT_TRUE(tensor_of(reference.tensor(read)).equal(tensor_of(reference.tensor(after))));
  EXPECT_FALSE(tensor_of(reference.tensor(read)).equal(tensor_of(reference.tensor(later))));
}

class OneStepLate final : public LearningRate {
 public:
  OneStepLate(double rate, const LearningRateSettings& settings) : LearningRate(rate, settings) {}
  double at(std::int64_t step) const override { return LearningRate::at(step > 0 ? step - 1 : 0); }
};

TEST(LearningRateStepFaults, AScheduleThatIsOneStepLateIsSeenAtTheRate) {
  const Case item = scheduled(step_case("ddp", {.dp = 3}), {RateKind::kLinear, 0, 0, 0}, false);
  RunOptions options;
  options.edits.parts = [&](TrainerParts& parts, Mesh&) {
    parts.learning_rate = std::make_unique<OneStepLate>(item.settings.optimizer.learning_rate,
                                                        item.learning_rate_schedule());
  };

  const Verdict verdict =
      judge(reference_of(item), run_case(item, reference_of(item), options), policy_of(item));

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().key.step, 1);
  EXPECT_EQ(verdict.findings.front().stage, Stage::kStepSettings);
  EXPECT_EQ(verdict.findings.front().key.name, "learning_rate");
}

}  // namespace
}  // namespace isoshard
