// SPDX-License-Identifier: Apache-2.0
// Steps that a loss scale made a run skip: their gradients may
// be infinite, and everything else is judged.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "harness/judge/judge.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

/// One step of scale 8: an activation, its gradient (as backward has it) and that of a parameter
/// with `bad` in one place, the flag, the norm.
struct ScaledStep {
  double bad = 1, found_inf = 0, activation = 1, declared = 8;
  bool has_flag = true;
  at::ScalarType dtype = at::kFloat;  ///< of gradients
  double master = 1;
};

Body step_of(const ScaledStep& s) {
  return [s](Sink& sink, int) {
    const auto scalar = [&](const char* name, double value) {
      sink.on_record(site(RecordKind::kScalar, name, layout_of({1})),
                     at::tensor({value}, at::kDouble));
    };
    if (s.has_flag) scalar("loss_scale", 8);
    sink.on_record(site(RecordKind::kActivation, "m", layout_of({4, 6})),
                   values({4, 6}, 1) * s.activation);
    at::Tensor backward = values({4, 6}, 2) * s.declared, gradient = values({3, 4}, 3);
    backward.view({-1})[5] = s.bad;
    gradient.view({-1})[5] = s.dtype == at::kHalf ? s.bad / 8 : s.bad;  // without the scale
    sink.on_record(site(RecordKind::kActivationGrad, "m", layout_of({4, 6}), s.declared),
                   backward.to(s.dtype));
    sink.on_record(site(RecordKind::kGrad, "m.weight", layout_of({3, 4})), gradient.to(s.dtype));
    if (s.has_flag) scalar("found_inf", s.found_inf);
    scalar("grad_norm", s.bad);
    sink.on_record(site(RecordKind::kOptimizer, "m.weight.master", layout_of({3, 4})),
                   values({3, 4}, 4) * s.master);
  };
}

Verdict verdict_of(const ScaledStep& expected, const ScaledStep& actual,
                   Level level = Level::kPerturbed) {
  const Reference right = reference(step_of(expected));
  JudgePolicy options = with_unused_axes();
  options.level = level;
  if (level != Level::kExact) options.rtol = 1e-6;
  options.activation_grad_scale = 1;
  return judge(right, run(MeshShape({{Axis::kDp, 2}}), &right, step_of(actual)), options);
}

TEST(SkippedSteps, ConformWithTheirInfinities) {
  const Verdict verdict =
      verdict_of({.bad = kInfinite, .found_inf = 1}, {.bad = kInfinite, .found_inf = 1});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_EQ(verdict.skipped, 3) << "two gradients and the norm";
  EXPECT_THAT(verdict.notes, ElementsAre(HasSubstr("4 tensors were compared; 3 of skipped steps "
                                                   "were not, as they are not finite in one of "
                                                   "the runs, first gradient at m")));
  EXPECT_EQ(verdict.compared, 4) << "scale, activation, flag, master";
}

TEST(SkippedSteps, MayOverflowInOtherPlacesUnlessTheyMustBeEqual) {
  const ScaledStep skipped{.bad = kInfinite, .found_inf = 1},
      elsewhere{.bad = -kInfinite, .found_inf = 1};

  EXPECT_EQ(verdict_of(skipped, elsewhere).status, Status::kConforms);
  EXPECT_EQ(verdict_of(skipped, skipped, Level::kExact).status, Status::kConforms);
  EXPECT_EQ(verdict_of(skipped, elsewhere, Level::kExact).status, Status::kDiverges);
}

/// A skipped step whose last rank has `bad` in the place of the infinity.
Verdict with_copies(const MeshShape& mesh, double bad, bool is_sum) {
  const Body body = [=](Sink& sink, int rank) {
    step_of({.bad = rank + 1 < mesh.world_size() ? kInfinite : bad, .found_inf = 1})(sink, rank);
  };
  // What dp ranks add: each of both summands has a copy on every tp rank.
  const Body sum = [=](Sink& sink, int rank) {
    step_of({.bad = kInfinite, .found_inf = 1})(sink, 0);
    Layout layout = layout_of({3});
    if (mesh.world_size() > 1) layout.placements = {partial(Axis::kDp, Reduction::kSum)};
    const double right = mesh.coordinate(rank, Axis::kDp) == 0 ? 1 : kInfinite;
    const bool is_last = rank + 1 == mesh.world_size();
    sink.on_record(site(RecordKind::kActivationGrad, "sum", layout, 8),
                   at::full({3}, is_last ? bad : right));
  };
  const Reference right = reference([=](Sink& sink, int) {
    step_of({.bad = kInfinite, .found_inf = 1})(sink, 0);
    if (is_sum)
      sink.on_record(site(RecordKind::kActivationGrad, "sum", layout_of({3}), 8),
                     at::full({3}, kInfinite));
  });
  JudgePolicy options = with_unused_axes();
  options.rtol = 1e-6;
  return judge(right, run(mesh, &right, is_sum ? sum : body), options);
}

// Which numbers overflow may differ from run to run, but not from copy to copy.
TEST(SkippedSteps, MustHaveEqualCopies) {
  const MeshShape mesh({{Axis::kDp, 2}, {Axis::kTp, 2}});
  const double nan = std::numeric_limits<double>::quiet_NaN();

  for (const bool is_sum : {false, true}) {
    EXPECT_EQ(with_copies(mesh, kInfinite, is_sum).status, Status::kConforms);
    for (const double bad : {nan, 1.0}) {
      const Verdict verdict = with_copies(mesh, bad, is_sum);

      ASSERT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
      EXPECT_THAT(verdict.findings.front(), FindingIs(FindingId::kCopiesOfSkippedStepDiffer));
      EXPECT_THAT(verdict.findings.front().ranks, ElementsAre(3));
    }
  }
}

/// A skipped step of two gradients of activations and one of a parameter, of which the reference
/// has an infinity in the last alone. The largest of its other numbers is `largest`.
struct Backward {
  double largest = 100;
  std::vector<double> first = {}, second = {},
                      weight = {};  ///< that are not finite, from the front
  const char* parameter = "first.weight";
};

Body backward_of(const Backward& b) {
  return [b](Sink& sink, int) {
    const auto gradient = [&](RecordKind kind, const char* name, const std::vector<double>& bad) {
      at::Tensor value = at::arange(1, 25, at::kDouble).reshape({4, 6}) * (b.largest / 24);
      for (std::size_t i = 0; i < bad.size(); ++i)
        value.view({-1})[static_cast<std::int64_t>(i)] = bad[i];
      sink.on_record(site(kind, name, layout_of({4, 6})), value.to(at::kHalf));
    };
    gradient(RecordKind::kActivationGrad, "second", b.first);
    gradient(RecordKind::kActivationGrad, "first", b.second);
    gradient(RecordKind::kGrad, b.parameter, b.weight);
    for (const char* const number : {"found_inf", "loss_scale"})
      sink.on_record(site(RecordKind::kScalar, number, layout_of({1})),
                     at::tensor({1.0}, at::kDouble));
    sink.on_record(
        site(RecordKind::kOptimizer, std::string(b.parameter) + ".master", layout_of({3})),
        values({3}, 4));
  };
}

Verdict backward_verdict(const Backward& expected, const Backward& actual) {
  const Reference right = reference(backward_of(expected));
  JudgePolicy policy = with_unused_axes();
  policy.rtol = 1e-3;
  policy.coarsest = Dtype::kFloat16;
  return judge(right, run(MeshShape({{Axis::kDp, 2}}), &right, backward_of(actual)), policy);
}

const double kNotANumber = std::numeric_limits<double>::quiet_NaN();

// The reference's infinity in one place is no excuse for a NaN where nothing comes near overflow.
TEST(SkippedSteps, AreFiniteFarFromOverflow) {
  const Backward expected{.weight = {kInfinite}};
  const std::vector<double> all(24, kNotANumber);

  for (const auto& [wrong, name] :
       {std::pair{Backward{.first = all, .second = all, .weight = all}, "second"},
        std::pair{Backward{.second = {kNotANumber}, .weight = {kInfinite}}, "first"},
        std::pair{Backward{.weight = all}, "first.weight"}}) {
    const Verdict verdict = backward_verdict(expected, wrong);

    ASSERT_EQ(verdict.status, Status::kDiverges) << name << ": " << verdict.reason;
    EXPECT_EQ(verdict.findings.front().key.name, name);
    EXPECT_THAT(verdict.findings.front(), FindingIs(FindingId::kNotFinite));
    EXPECT_THAT(verdict.findings.front().ranks, ElementsAre(0, 1));
  }
}

// A product of its module that nobody recorded may have overflowed before it.
TEST(SkippedSteps, AreNotHeldToGradientsOfModulesThatNobodyRecorded) {
  const std::vector<double> all(24, kNotANumber);
  const char* const other = "other.weight";

  const Verdict verdict = backward_verdict({.weight = {kInfinite}, .parameter = other},
                                           {.weight = all, .parameter = other});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
}

TEST(SkippedSteps, MayHaveOtherPlacesNearOverflowAndBehindIt) {
  const std::vector<double> all(24, kNotANumber);
  const Backward expected{.weight = {kInfinite}}, near{.largest = 12000, .weight = {kInfinite}};
  const Backward spread{.first = {kInfinite}};

  for (const auto& [right, legal] :
       {std::pair{expected, Backward{.weight = {kNotANumber, kInfinite, kInfinite}}},
        std::pair{near,
                  Backward{.largest = 12000, .first = {kInfinite}, .second = all, .weight = all}},
        std::pair{spread, Backward{.first = {kInfinite}, .second = all, .weight = all}}}) {
    const Verdict verdict = backward_verdict(right, legal);
    EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  }
}

TEST(SkippedSteps, ThatAreAllStepsLeaveTheOptimizerUnjudged) {
  const ScaledStep skipped{.bad = kInfinite, .found_inf = 1};

  for (const Level level : {Level::kPerturbed, Level::kExact}) {
    EXPECT_THAT(verdict_of(skipped, skipped, level).reason,
                HasSubstr("every step was skipped, as gradients are not finite: no step of the "
                          "optimizer was judged"));
    EXPECT_THAT(verdict_of({}, {}, level).reason, Not(HasSubstr("skipped")));
  }
}

// Other places, but the same ones on both ranks.
TEST(SkippedSteps, MayHaveNansInAllCopies) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Verdict verdict =
      verdict_of({.bad = kInfinite, .found_inf = 1}, {.bad = nan, .found_inf = 1});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_THAT(verdict.findings, IsEmpty());
}

TEST(SkippedSteps, AreJudgedInAllElse) {
  const ScaledStep skipped{.bad = kInfinite, .found_inf = 1};
  ScaledStep wrong = skipped;
  wrong.activation = 1.5;

  const Verdict verdict = verdict_of(skipped, wrong);

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_EQ(verdict.findings.front().key.name, "m");
}

TEST(SkippedSteps, MustBeSkippedByBoth) {
  for (const Level level : {Level::kPerturbed, Level::kExact}) {
    const Verdict lost =
        verdict_of({.bad = kInfinite, .found_inf = 1}, {.bad = 1, .found_inf = 0}, level);
    const Verdict extra =
        verdict_of({.bad = 1, .found_inf = 0}, {.bad = kInfinite, .found_inf = 1}, level);

    ASSERT_EQ(lost.status, Status::kDiverges) << lost.reason;
    if (level != Level::kExact) {
      EXPECT_EQ(lost.findings.front().key.name, "found_inf");
    }
    EXPECT_EQ(extra.status, Status::kDiverges) << extra.reason;
  }
}

TEST(SkippedSteps, AreNoExcuseWhereNothingIsSkipped) {
  EXPECT_EQ(
      verdict_of({.bad = kInfinite, .found_inf = 0}, {.bad = kInfinite, .found_inf = 0}).status,
      Status::kVacuous);
  EXPECT_EQ(verdict_of({.bad = kInfinite, .declared = 1, .has_flag = false},
                       {.bad = kInfinite, .declared = 1, .has_flag = false})
                .status,
            Status::kVacuous);
}

TEST(SkippedSteps, ActivationGradientsDeclareTheScale) {
  const Verdict verdict = verdict_of({}, {.declared = 1});

  ASSERT_EQ(verdict.status, Status::kDiverges);
  EXPECT_THAT(verdict.findings.front(), FindingIs(FindingId::kOtherGradientScale,
                                                  {{"declared", 1}, {"rank", 0}, {"demanded", 8}}));
}

/// Two ranks with steps of their own, judged by what the legal run `legal` moves.
Verdict parted_verdict(const ScaledStep& expected, const ScaledStep& legal, const ScaledStep& first,
                       const ScaledStep& second) {
  const Reference right = reference(
      step_of(expected), [&](int) { return step_of(legal); }, 3);
  JudgePolicy options = with_unused_axes();
  options.activation_grad_scale = 1;
  const Body body = [&](Sink& sink, int rank) { step_of(rank == 0 ? first : second)(sink, rank); };
  return judge(right, run(MeshShape({{Axis::kDp, 2}}), &right, body), options);
}

const ScaledStep kFinite{.bad = 1, .found_inf = 0};
const ScaledStep kOverflows{.bad = kInfinite, .found_inf = 1};

// Whether a step overflows may depend on roundings. What follows from skipping it is not compared
// then, and the verdict is none; what comes before is.
TEST(PartingSteps, AreThoseThatLegalRunsSkipOrNot) {
  ScaledStep wrong_master = kOverflows, wrong_forward = kOverflows;
  wrong_master.master = 2;
  wrong_forward.activation = 1.5;

  for (const auto& [expected, other] :
       {std::pair{kFinite, kOverflows}, std::pair{kOverflows, kFinite}}) {
    const Verdict parted = parted_verdict(expected, other, other, other);
    EXPECT_EQ(parted.status, Status::kVacuous) << parted.reason;
    const bool is_run_finite = other.found_inf == 0;
    EXPECT_THAT(parted.rule,
                RuleIs(RuleId::kOverflowParts, {{"gradients", 2},
                                                {"step", 0},
                                                {"run", is_run_finite ? 0 : 2},
                                                {"reference", is_run_finite ? 2 : 0}}));
    EXPECT_FALSE(parted.shows_too_little) << "no step holds an emulation to the plain run";
    EXPECT_EQ(parted_verdict(expected, expected, other, other).status, Status::kDiverges)
        << "no legal run does that";
  }
  EXPECT_EQ(parted_verdict(kFinite, kOverflows, wrong_master, wrong_master).status,
            Status::kVacuous);
  const Verdict before = parted_verdict(kFinite, kOverflows, wrong_forward, wrong_forward);
  ASSERT_EQ(before.status, Status::kDiverges) << before.reason;
  EXPECT_EQ(before.findings.front().key.name, "m");
}

// Gradients of a step that both skip are compared with nothing.
TEST(PartingSteps, HoldAnEmulationToThePlainRunAfterAWholeStep) {
  for (const ScaledStep& before : {kFinite, kOverflows}) {
    const auto then = [&](const ScaledStep& second) -> Body {
      return [=](Sink& sink, int rank) {
        step_of(before)(sink, rank);
        sink.begin_step(1);
        step_of(second)(sink, rank);
      };
    };
    const Reference right = reference(
        then(kFinite), [&](int) { return then(kOverflows); }, 3);
    JudgePolicy options = with_unused_axes();
    options.activation_grad_scale = 1;
    const Verdict parted =
        judge(right, run(MeshShape({{Axis::kDp, 2}}), &right, then(kOverflows)), options);

    EXPECT_TRUE(parted.parted) << parted.reason;
    EXPECT_EQ(parted.status, Status::kVacuous);
    EXPECT_EQ(parted.shows_too_little, before.found_inf == 0);
  }
}

// Its masters are another training's: they would let anything pass.
TEST(PartingSteps, OfLegalRunsEndWhatTheyShow) {
  ScaledStep legal = kOverflows;
  legal.master = 2;
  const Reference right = reference(
      step_of(kFinite), [&](int) { return step_of(legal); }, 3);

  EXPECT_EQ(right.response({0, RecordKind::kOptimizer, "m.weight.master", 0}), nullptr);
  EXPECT_NE(right.response({0, RecordKind::kActivation, "m", 0}), nullptr);
  EXPECT_EQ(right.response({0, RecordKind::kScalar, "found_inf", 0})->absolute_norm, 1);

  ScaledStep alike = kFinite;
  alike.master = 2;
  Reference redrawn = reference(
      step_of(kFinite), [&](int) { return step_of(alike); }, 3);
  redrawn.add_redrawn(run(MeshShape(), &redrawn, step_of(legal), Keep::kNothing, JudgePolicy(),
                          RunPurpose::kResponse));
  const auto& sums = redrawn.redrawn().sums;
  EXPECT_TRUE(sums.contains({0, RecordKind::kActivation, "m", 0}));
  EXPECT_FALSE(sums.contains({0, RecordKind::kOptimizer, "m.weight.master", 0}));
}

// A flag that is not reduced over ranks, one that nothing made, and one that is not set.
TEST(PartingSteps, AreThoseThatAllRanksAndTheirGradientsShow) {
  const ScaledStep made_up{.bad = 1, .found_inf = 1}, lost{.bad = kInfinite, .found_inf = 0};

  for (const auto& [expected, legal, first, second] :
       {std::tuple{kOverflows, kFinite, kOverflows, kFinite},
        std::tuple{kFinite, kOverflows, kOverflows, kFinite},
        std::tuple{kFinite, kOverflows, made_up, made_up},
        std::tuple{kOverflows, kFinite, lost, lost}}) {
    const Verdict verdict = parted_verdict(expected, legal, first, second);
    EXPECT_EQ(verdict.status, Status::kDiverges) << verdict.reason;
  }
}

// Pieces of a sum may overflow where the sum does not.
TEST(PartingSteps, AreThoseWhoseGradientsComeNearTheLargestNumber) {
  const auto judged = [](double largest, double found_inf) {
    const ScaledStep expected{.bad = largest, .found_inf = found_inf, .dtype = at::kHalf};
    ScaledStep run = found_inf == 0 ? kOverflows : kFinite;
    run.dtype = at::kHalf;
    return parted_verdict(expected, expected, run, run).status;
  };

  EXPECT_EQ(judged(20000, 0), Status::kVacuous);
  EXPECT_EQ(judged(-20000, 0), Status::kVacuous);
  EXPECT_EQ(judged(12000, 0), Status::kDiverges) << "more than 4 times from it";
  EXPECT_EQ(judged(kInfinite, 1), Status::kDiverges) << "a run must skip what overflows by far";
}

}  // namespace
}  // namespace isoshard
