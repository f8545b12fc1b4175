// SPDX-License-Identifier: Apache-2.0
/// In 16 bits a step may be far smaller than what moved weights show; it must be made all the same.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/judge/judge.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::HasSubstr;

constexpr double kUlp = 0x1p-8;  ///< of bf16, relative

/// A weight in bf16, and after two steps, by gradients that point where the steps go, what it is
/// stepped in.
struct Training {
  at::ScalarType dtype = at::kFloat;  ///< of what is stepped; fp32: masters
  double ulps = 0.1;                  ///< size of a step
  double begin = 0;                   ///< how far from the right weight it begins
  double first = 1, second = 1;       ///< factors of the right steps
  double rate = 1;                    ///< of the second step, in units of the first one's
  double noise = 0;                   ///< of a step, relative
  int seed = 50;
};

Body training(const Training& t) {
  return [t](Sink& sink, int) {
    const Layout layout = layout_of({32, 16});
    const auto noise = [&](int i, double size) { return 1 + size * values({32, 16}, t.seed + i); };
    const at::Tensor weight =
        (values({32, 16}, 1) * noise(0, t.begin)).to(at::kBFloat16).to(at::kDouble);
    const at::Tensor step = values({32, 16}, 2) * (kUlp * t.ulps);
    const at::Tensor after = (weight - t.first * step * noise(1, t.noise)).to(t.dtype);
    const at::Tensor end =
        (after.to(at::kDouble) - t.rate * t.second * step * noise(2, t.noise)).to(t.dtype);
    const bool has_masters = t.dtype == at::kFloat;
    const auto record = [&](const at::Tensor& value) {
      const at::Tensor rounded = value.to(at::kBFloat16);
      sink.on_record(site(RecordKind::kParam, "w", layout), rounded);
      if (has_masters) sink.on_record(site(RecordKind::kOptimizer, "w.master", layout), value);
    };
    const auto gradient = [&](int i) {
      sink.on_record(site(RecordKind::kGrad, "w", layout),
                     (values({32, 16}, 2) * noise(i, t.noise)).to(at::kBFloat16));
    };
    sink.on_record(site(RecordKind::kParam, "w", layout), weight.to(at::kBFloat16));
    gradient(1);
    record(after);
    sink.begin_step(1);
    gradient(2);
    record(end);
  };
}

/// `response_noise`: of the perturbed runs' steps.
Verdict verdict_of(const Training& actual, double response_noise = 0.02) {
  JudgePolicy policy = with_unused_axes();
  policy.coarsest = Dtype::kBFloat16;
  Training right;
  right.dtype = actual.dtype;
  right.ulps = actual.ulps;
  right.rate = actual.rate;
  const Reference wanted = reference(
      training(right),
      [&](int i) {
        Training moved = right;
        moved.begin = kUlp;
        moved.noise = response_noise;
        moved.seed = 60 + 10 * i;
        return training(moved);
      },
      3, policy);
  return judge(
      wanted,
      run(MeshShape({{Axis::kDp, 2}}), &wanted, training(actual), Keep::kEverything, policy),
      policy);
}

TEST(SeenSteps, ARunWhoseStepsHaveLegalRoundingsConforms) {
  EXPECT_EQ(verdict_of({}).status, Status::kConforms);
  const Verdict verdict = verdict_of({.noise = 0.05});
  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
}

TEST(SeenSteps, AStepThatIsLeftOutOrTurnedRoundDiverges) {
  for (const double factor : {0.0, -1.0, 2.0}) {
    const Verdict both = verdict_of({.first = factor, .second = factor});
    ASSERT_EQ(both.status, Status::kDiverges) << factor;
    EXPECT_EQ(both.findings.front().key, (RecordKey{0, RecordKind::kOptimizer, "w.master", 0}));
    const Verdict last = verdict_of({.second = factor});
    ASSERT_EQ(last.status, Status::kDiverges) << factor;
    EXPECT_EQ(last.findings.front().key, (RecordKey{1, RecordKind::kOptimizer, "w.master", 0}));
  }
}

// With a rate that falls, as under a cosine, the error of the steps before is larger than a step. A
// step that is left out is seen as long as it is not.
TEST(SeenSteps, TheErrorOfStepsBeforeIsNoneOfTheLast) {
  EXPECT_EQ(verdict_of({.rate = 0.05, .noise = 0.05}).status, Status::kConforms);
  EXPECT_EQ(verdict_of({.second = 0, .rate = 0.1, .noise = 0.02}).status, Status::kDiverges);
  EXPECT_EQ(verdict_of({.second = 0, .rate = 0.01, .noise = 0.05}).status, Status::kConforms)
      << "it is hidden by the step before";
}

TEST(SeenSteps, StepsInSixteenBitsAreSeenWhereTheyMoveManyElements) {
  for (const double noise : {0.0, 0.05})
    EXPECT_EQ(verdict_of({.dtype = at::kBFloat16, .ulps = 0.4, .noise = noise}).status,
              Status::kConforms);
  for (const double factor : {0.0, -1.0}) {
    EXPECT_EQ(verdict_of({.dtype = at::kBFloat16, .ulps = 0.4, .first = factor}).status,
              Status::kDiverges);
  }
}

// Where a correct run may end anywhere, nothing is demanded of a step. But no step was seen.
TEST(SeenSteps, StepsThatRoundingsMakeAreNotHeldToTheirSize) {
  const auto expect_nothing_moved = [](const Verdict& verdict) {
    EXPECT_TRUE(verdict.findings.empty()) << verdict.reason;
    EXPECT_EQ(verdict.rule.id, RuleId::kNothingMoved);
  };
  expect_nothing_moved(verdict_of({.first = 0, .second = 0}, /*response_noise=*/0.8));
  // Without masters small steps are lost in rounding: few elements move, others in each run.
  expect_nothing_moved(verdict_of({.dtype = at::kBFloat16, .ulps = 0.02, .first = 0, .second = 0}));
}

}  // namespace
}  // namespace isoshard
