// SPDX-License-Identifier: Apache-2.0
/// Rows of a table in 16 bits: each makes its own step, and what no token read stays.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "harness/judge/judge.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"
#include "harness/trace/masked_steps.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;

constexpr std::int64_t kTableRows = 1000, kTableWidth = 16;
constexpr std::int64_t kUnread = 900;  ///< rows from this one on are unread
constexpr double kSgdRate = 0.05;

/// Two steps of SGD on a table in bf16, and what a run does otherwise.
struct SgdSteps {
  double noise = 0;  ///< of gradients, relative to the largest
  double decay = 0;
  int seed = 0;
  int row = -1;  ///< that makes `factor` of its steps
  double factor = 1;
  double unread_gradient = 0, unread_weight = 0;  ///< added to an unread row
  double rate = 1;                                ///< of the second step, of the reference's too
};

Body sgd_body(const SgdSteps& s, bool is_whole) {
  return [=](Sink& sink, int rank) {
    const auto record = [&](RecordKind kind, const at::Tensor& value) {
      const at::Tensor own =
          is_whole ? value : value.narrow(0, rank * kTableRows / 2, kTableRows / 2);
      sink.on_record(
          site(kind, "table.weight", layout_of({kTableRows, kTableWidth}, {shard(Axis::kTp, 0)})),
          own.to(at::kBFloat16));
    };
    at::Tensor weight = values({kTableRows, kTableWidth}, 1).to(at::kBFloat16);
    for (int step = 0; step < 2; ++step) {
      sink.begin_step(step);
      if (step == 0) record(RecordKind::kParam, weight);
      sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({kUnread})),
                     at::arange(kUnread, at::kLong));
      at::Tensor gradient = values({kTableRows, kTableWidth}, 2).to(at::kDouble);
      // rows from 100 on have gradients that are noise
      gradient.narrow(0, 100, 50) *= 1e-3;
      gradient += s.noise * values({kTableRows, kTableWidth}, 3 + s.seed + step);
      gradient.narrow(0, kUnread, kTableRows - kUnread).zero_();
      gradient[kUnread + 3][2] = s.unread_gradient;
      record(RecordKind::kGrad, gradient);
      at::Tensor change = -kSgdRate * (gradient.to(at::kBFloat16).to(at::kDouble) +
                                       s.decay * weight.to(at::kDouble));
      if (s.row >= 0) change[s.row] *= s.factor;
      if (step == 1) change *= s.rate;
      weight = (weight.to(at::kDouble) + change).to(at::kBFloat16);
      weight[kUnread + 3] += s.unread_weight;
      record(RecordKind::kParam, weight);
    }
  };
}

Verdict sgd_verdict(const SgdSteps& actual, bool mask = false) {
  JudgePolicy policy;
  policy.coarsest = Dtype::kBFloat16;
  policy.mask = mask;
  if (mask) policy.step_rule = StepRule{1, 0, 0.9, 0.999, 1e-8};
  SgdSteps right;
  right.decay = actual.decay;
  right.rate = actual.rate;
  const Reference wanted = reference(
      sgd_body(right, true),
      [&](int i) {
        SgdSteps moved = right;
        moved.noise = 0.01;
        moved.seed = 10 * (i + 1);
        return sgd_body(moved, true);
      },
      3, policy);
  const MeshShape mesh({{Axis::kTp, 2}});
  return judge(wanted, run(mesh, &wanted, sgd_body(actual, false), Keep::kWhatDiffers, policy),
               policy);
}

TEST(RowSteps, ThatAreNotMadeOrMadeTwiceAreSeenInOneRow) {
  for (const bool mask : {false, true}) {
    for (const double factor : {0.0, -1.0, 2.0}) {
      const Verdict verdict = sgd_verdict({.row = 70, .factor = factor}, mask);

      ASSERT_EQ(verdict.status, Status::kDiverges) << factor << " " << mask << verdict.reason;
      const Finding& first = verdict.findings.front();
      EXPECT_EQ(first.key, (RecordKey{0, RecordKind::kParam, "table.weight", 1}));
      EXPECT_THAT(first, FindingIs(FindingId::kRowWithoutStep, {{"rank", 0}}));
      EXPECT_EQ(numbers_of(first.measured, "index").at(0), 70);
      EXPECT_TRUE(first.confirmed);
    }
  }
}

TEST(RowSteps, OfLegalRunsAreWithin) {
  for (const bool mask : {false, true}) {
    for (const double noise : {0.0, 0.005, 0.01}) {
      const Verdict verdict = sgd_verdict({.noise = noise, .seed = 100}, mask);
      EXPECT_EQ(verdict.status, Status::kConforms) << noise << " " << mask << verdict.reason;
    }
  }
}

// What the first step was off by is as much as the whole second one.
TEST(RowSteps, AreNotHeldToTheErrorsOfLargerStepsBefore) {
  EXPECT_EQ(sgd_verdict({.row = 70, .factor = 1.3, .rate = 0.3}).status, Status::kConforms);
  EXPECT_EQ(sgd_verdict({.row = 70, .factor = 0, .rate = 0.3}).status, Status::kDiverges);
}

// One element that moves by sixteen times as much as each of the others is most of the row, and may
// lie at the border of a rounding.
TEST(RowSteps, AreNotDecidedByOneElement) {
  const auto verdict_of = [](bool is_large_left_out) {
    JudgePolicy policy;
    policy.coarsest = Dtype::kBFloat16;
    const auto body = [](bool leaves_out, double noise, int seed) -> Body {
      return [=](Sink& sink, int) {
        const Layout layout = layout_of({400, 16});
        at::Tensor weight = values({400, 16}, 1).abs() + 1;
        weight.select(1, 0).fill_(32);
        weight = weight.to(at::kBFloat16);
        sink.on_record(site(RecordKind::kParam, "w", layout), weight);
        const at::Tensor gradient = at::ones({400, 16}) + noise * values({400, 16}, seed);
        sink.on_record(site(RecordKind::kGrad, "w", layout), gradient.to(at::kBFloat16));
        at::Tensor after = weight.to(at::kFloat) - 0x1p-7;
        after.select(1, 0).fill_(32 - 0x1p-3);
        if (leaves_out) after[5][0] = 32;
        sink.on_record(site(RecordKind::kParam, "w", layout), after.to(at::kBFloat16));
      };
    };
    const Reference wanted = reference(
        body(false, 0, 0), [&](int i) { return body(false, 0.01, 10 + i); }, 3, policy);
    return judge(
        wanted,
        run(MeshShape(), &wanted, body(is_large_left_out, 0, 0), Keep::kWhatDiffers, policy),
        policy);
  };
  EXPECT_EQ(verdict_of(false).status, Status::kConforms);
  const Verdict verdict = verdict_of(true);
  for (const Finding& finding : verdict.findings)
    EXPECT_NE(finding.id, FindingId::kRowWithoutStep) << finding.what;
}

// Where a gradient is noise, so is the sign of its step.
TEST(RowSteps, OfNoiseAreNotHeldToTheirSign) {
  EXPECT_EQ(sgd_verdict({.row = 120, .factor = 0}).status, Status::kConforms);
}

TEST(RowSteps, OfRowsThatNoTokenReadAreNone) {
  const Verdict gradient = sgd_verdict({.unread_gradient = 1e-3});
  ASSERT_EQ(gradient.status, Status::kDiverges) << gradient.reason;
  EXPECT_EQ(gradient.findings.front().key.kind, RecordKind::kGrad);
  EXPECT_THAT(gradient.findings.front(), FindingIs(FindingId::kUntouchedElementMoved));

  const Verdict weight = sgd_verdict({.unread_weight = 0.02});
  ASSERT_EQ(weight.status, Status::kDiverges) << weight.reason;
  EXPECT_EQ(weight.findings.front().key.kind, RecordKind::kParam);
  EXPECT_EQ(sgd_verdict({.decay = 0.1}).status, Status::kConforms);
  // a decay that is no factor may round in two ways
  EXPECT_EQ(sgd_verdict({.decay = 0.1, .unread_weight = 0.004}).status, Status::kConforms);
}

}  // namespace
}  // namespace isoshard
