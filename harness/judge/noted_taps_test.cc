// SPDX-License-Identifier: Apache-2.0
/// Activation gradients that differ alone: a note where parameters' gradients clear them, and a
/// failed verdict in every other case.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "harness/judge/judge.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const MeshShape kTp2({{Axis::kTp, 2}});

/// What one run of two parameters records; each number is a factor on what is right.
struct Factors {
  double forward = 1, tap = 1, tap_on_rank_1 = 1, gradient = 1, stepped = 1;
  double scale = 1;  ///< declared on the activation gradient
  bool has_gradient_of_v = true, has_forward = true, nan_in_tap = false;
};

/// `perturbed`: a number of a run whose roundings differ, or -1.
Body body_of(const Factors& run, int perturbed = -1) {
  return [run, perturbed](Sink& sink, int rank) {
    const Layout matrix = layout_of({4, 4});
    const auto record = [&](RecordKind kind, const char* name, int seed, double factor,
                            double scale = 1) {
      at::Tensor value = values({4, 4}, seed) * factor;
      if (perturbed >= 0) value += values({4, 4}, 100 * (perturbed + 1) + seed) * 1e-7;
      sink.on_record(site(kind, name, matrix, scale), value);
    };
    record(RecordKind::kParam, "w", 1, 1);
    record(RecordKind::kParam, "v", 2, 1);
    if (run.has_forward) record(RecordKind::kActivation, "up", 3, run.forward);
    const double tap = run.nan_in_tap ? NAN : run.tap * (rank == 1 ? run.tap_on_rank_1 : 1);
    record(RecordKind::kActivationGrad, "up", 4, tap, run.scale);
    record(RecordKind::kGrad, "w", 5, run.gradient);
    if (run.has_gradient_of_v) record(RecordKind::kGrad, "v", 6, 1);
    record(RecordKind::kParam, "w", 7, run.stepped);
    record(RecordKind::kParam, "v", 8, 1);
  };
}

Verdict verdict_of(const Factors& run, const JudgePolicy& extra = {}, const Factors& right = {}) {
  const Reference r = reference(body_of(right), [&](int i) { return body_of(right, i); });
  const Trace trace = synthetic::run(kTp2, &r, body_of(run));
  JudgePolicy policy = with_unused_axes(extra);
  policy.activation_grad_scale = 1;
  return judge(r, trace, policy);
}

JudgePolicy foreign() {
  JudgePolicy policy;
  policy.taps_may_differ = true;
  return policy;
}

TEST(NotedTaps, ATapThatEveryParameterClearsIsANote) {
  for (const Factors& run : {Factors{.tap = 2}, Factors{.tap_on_rank_1 = 0.5}}) {
    const Verdict verdict = verdict_of(run, foreign());

    EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
    EXPECT_THAT(verdict.findings, IsEmpty());
    EXPECT_THAT(verdict.notes, Contains(HasSubstr("1 activation gradient alone differs, first "
                                                  "gradient at up (step 0)")))
        << verdict.notes.size();
    EXPECT_THAT(verdict.notes, Contains(HasSubstr("all 2 gradients of parameters are right")));
  }
}

TEST(NotedTaps, OfOurOwnRunsItIsAFailedVerdict) {
  EXPECT_EQ(verdict_of({.tap = 2}).status, Status::kDiverges);
}

TEST(NotedTaps, AnythingElseThatIsWrongLeavesItAFinding) {
  const std::map<const char*, Factors> runs = {
      {"forward", {.forward = 1.1, .tap = 2}},
      {"a parameter's gradient", {.tap = 2, .gradient = 2}},
      {"a parameter after the step", {.tap = 2, .stepped = 1.1}},
      {"a gradient that is missing", {.tap = 2, .has_gradient_of_v = false}},
      {"an activation that is missing", {.tap = 2, .has_forward = false}},
      {"a factor that is declared", {.tap = 2, .scale = 2}},
      {"a tap that is no number", {.nan_in_tap = true}},
      {"a tap that is off by little more than gradients may be", {.tap = 1 + 2e-6}},
  };
  for (const auto& [what, run] : runs)
    EXPECT_EQ(verdict_of(run, foreign()).status, Status::kDiverges) << what;
}

TEST(NotedTaps, WhatNeedNotBeRecordedClearsNothing) {
  JudgePolicy policy = foreign();
  policy.not_recorded = {"grad/v"};
  EXPECT_EQ(verdict_of({.tap = 2, .has_gradient_of_v = false}, policy).status, Status::kDiverges);
  policy.not_recorded = {"activation/*"};
  EXPECT_EQ(verdict_of({.tap = 2, .has_forward = false}, policy).status, Status::kDiverges);
}

TEST(NotedTaps, AToleranceThatSomebodyGaveClearsNothing) {
  JudgePolicy policy = foreign();
  policy.rtol = 1e-5;
  EXPECT_EQ(verdict_of({.tap = 2}, policy).status, Status::kDiverges);
}

TEST(NotedTaps, AFrozenParameterClearsNothing) {
  const Factors frozen{.has_gradient_of_v = false};
  Factors run = frozen;
  run.tap = 2;
  EXPECT_EQ(verdict_of(run, foreign(), frozen).status, Status::kDiverges);
}

}  // namespace
}  // namespace isoshard
