// SPDX-License-Identifier: Apache-2.0
/// Claims about rules that make a run without findings vacuous: each stops a run that shows
/// nothing, and lets its right control pass.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "harness/judge/judge.h"
#include "harness/testing/said_matchers.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using testing::ElementsAre;
using testing::IsEmpty;

const MeshShape kDp2({{Axis::kDp, 2}});
const MeshShape kTp2({{Axis::kTp, 2}});
const MeshShape kPp2({{Axis::kPp, 2}});

/// One step of a layer: an activation, a gradient, and the weight before and after.
struct Step {
  at::Tensor weight = values({4, 6}, 1);
  at::Tensor activation = values({4, 6}, 2);
  at::Tensor gradient = values({4, 6}, 3);
  at::Tensor after = values({4, 6}, 4);
};

/// Which records are cut in two along an axis, by rows.
struct Cut {
  Axis axis = Axis::kTp;
  bool weights = false, activations = false;
};

/// `rows` are those of one rank.
void record(Sink& sink, int rank, const Step& step, const Cut& cut, int rows = 2) {
  const auto put = [&](RecordKind kind, const char* name, const at::Tensor& t, bool is_cut) {
    const Layout layout = is_cut ? layout_of({4, 6}, {shard(cut.axis, 0)}) : layout_of({4, 6});
    const at::Tensor local = is_cut ? t.narrow(0, rows * rank, rows).contiguous() : t;
    if (kind == RecordKind::kActivation)
      (void)sink.on_activation(site(kind, name, layout), local);
    else
      sink.on_record(site(kind, name, layout), local);
  };
  put(RecordKind::kParam, "w", step.weight, cut.weights);
  put(RecordKind::kActivation, "x", step.activation, cut.activations);
  put(RecordKind::kGrad, "w", step.gradient, cut.weights);
  put(RecordKind::kParam, "w", step.after, cut.weights);
}

Reference reference_of(const Step& step) {
  return reference([step](Sink& sink, int rank) { record(sink, rank, step, {}); },
                   [step](int i) {
                     Step moved = step;
                     for (at::Tensor* t : {&moved.activation, &moved.gradient, &moved.after})
                       *t = *t * (1 + 1e-6 * values({4, 6}, 50 + i));
                     return Body([moved](Sink& sink, int rank) { record(sink, rank, moved, {}); });
                   });
}

Verdict judged(const MeshShape& mesh, const Step& step, const Cut& cut) {
  const Reference reference = reference_of(step);
  const int rows = 4 / mesh.axes().front().degree;
  const Body body = [&](Sink& sink, int rank) { record(sink, rank, step, cut, rows); };
  return judge(reference, run(mesh, &reference, body), {});
}

std::vector<std::string> witnesses(const Verdict& verdict) {
  std::vector<std::string> tensors;
  for (const AxisWitness& witness : verdict.witnesses) tensors.push_back(witness.tensor);
  return tensors;
}

TEST(AxisWitnesses, ARunThatDoesTheWholeWorkOnEachRankIsVacuous) {
  const Verdict verdict = judged(kTp2, {}, {});

  EXPECT_EQ(verdict.status, Status::kVacuous) << verdict.reason;
  EXPECT_THAT(verdict.rule, RuleIs(RuleId::kAxisWithoutWitness, {{"axis", "tp"}, {"degree", 2}}));
  EXPECT_FALSE(verdict.shows_too_little) << "no emulation makes up for it";
}

TEST(AxisWitnesses, ATensorThatIsCutAlongTheAxisShowsIt) {
  const Verdict verdict = judged(kTp2, {}, {.axis = Axis::kTp, .weights = true});

  EXPECT_EQ(verdict.status, Status::kConforms) << verdict.reason;
  EXPECT_THAT(witnesses(verdict), ElementsAre("weight as read w (step 0)"));
}

TEST(AxisWitnesses, PartsWithEqualContentsShowNothing) {
  Step step;
  for (at::Tensor* t : {&step.weight, &step.activation, &step.gradient, &step.after})
    *t = at::cat({t->narrow(0, 0, 2), t->narrow(0, 0, 2)});
  const Cut cut{.axis = Axis::kTp, .weights = true, .activations = true};

  EXPECT_THAT(judged(kTp2, step, cut).rule,
              RuleIs(RuleId::kAxisWithoutWitness, {{"axis", "tp"}, {"degree", 2}}));
}

TEST(AxisWitnesses, EachTwoCoordinatesMustBeToldApart) {
  const MeshShape tp4({{Axis::kTp, 4}});
  const Cut cut{.axis = Axis::kTp, .weights = true, .activations = true};
  Step repeated;  // row 2 repeats row 0, so ranks 0 and 2 hold the same
  for (at::Tensor* t :
       {&repeated.weight, &repeated.activation, &repeated.gradient, &repeated.after})
    *t = t->index_select(0, at::tensor({0, 1, 0, 3}));

  const Verdict verdict = judged(tp4, repeated, cut);

  EXPECT_THAT(verdict.rule, RuleIs(RuleId::kAxisWithoutWitness,
                                   {{"axis", "tp"}, {"degree", 4}, {"first", 0}, {"second", 2}}));
  EXPECT_THAT(witnesses(verdict), ElementsAre("weight as read w (step 0)"));
  EXPECT_EQ(judged(tp4, {}, cut).status, Status::kConforms);
}

TEST(AxisWitnesses, ATensorOnWhichTheLossDoesNotDependShowsNothing) {
  Step dead;  // the gradient of v keeps the run from being vacuous by another rule
  dead.gradient = at::zeros({4, 6});
  const auto body = [&](const Step& step, bool is_cut) {
    return Body([=](Sink& sink, int rank) {
      record(sink, rank, step, {.axis = Axis::kTp, .weights = is_cut});
      sink.on_record(site(RecordKind::kGrad, "v", layout_of({4, 6})), values({4, 6}, 9));
    });
  };
  const auto judged = [&](const Step& step) {
    const Reference whole = reference(body(step, false), [&](int) { return body(step, false); });
    return judge(whole, run(kTp2, &whole, body(step, true)), {});
  };

  EXPECT_THAT(judged(dead).rule,
              RuleIs(RuleId::kAxisWithoutWitness, {{"axis", "tp"}, {"degree", 2}}));
  EXPECT_THAT(witnesses(judged({})), ElementsAre("weight as read w (step 0)"));
}

TEST(AxisWitnesses, ShardsOfParametersSayNothingOfTheSamplesOfDp) {
  Step equal_samples;
  equal_samples.activation =
      at::cat({equal_samples.activation.narrow(0, 0, 2), equal_samples.activation.narrow(0, 0, 2)});
  const Cut cut{.axis = Axis::kDp, .weights = true, .activations = true};

  EXPECT_THAT(judged(kDp2, equal_samples, cut).rule,
              RuleIs(RuleId::kAxisWithoutWitness, {{"axis", "dp"}, {"degree", 2}}));
  const Verdict other_samples = judged(kDp2, {}, cut);
  EXPECT_EQ(other_samples.status, Status::kConforms) << other_samples.reason;
  EXPECT_THAT(witnesses(other_samples), ElementsAre("forward at x (step 0)"));
}

/// Each rank of a pipeline has layers that the other has not.
TEST(AxisWitnesses, TensorsThatAreEachOnOtherRanksShowStages) {
  const Body all = [](Sink& sink, int) {
    for (const int layer : {0, 1})
      (void)sink.on_activation(
          site(RecordKind::kActivation, layer == 0 ? "a" : "b", layout_of({4, 6})),
          values({4, 6}, layer));
  };
  const Reference r = reference(all, [&](int) { return all; });
  const Body stages = [](Sink& sink, int rank) {
    (void)sink.on_activation(site(RecordKind::kActivation, rank == 0 ? "a" : "b",
                                  layout_of({4, 6}, {only_at(Axis::kPp, rank)})),
                             values({4, 6}, rank));
  };

  EXPECT_THAT(witnesses(judge(r, run(kPp2, &r, stages), {})),
              ElementsAre("forward at a (step 0), forward at b (step 0)"));
  EXPECT_THAT(witnesses(judge(r, run(kPp2, &r, all), {})), ElementsAre(""));
}

TEST(NoEvidence, GradientsThatAreAllZeroMakeARunVacuous) {
  Step dead;
  dead.gradient = at::zeros({4, 6});
  const Cut cut{.axis = Axis::kTp, .weights = true};

  EXPECT_THAT(judged(kTp2, dead, cut).rule, RuleIs(RuleId::kGradientsZero, {{"gradients", 1}}));
}

TEST(NoEvidence, ParametersThatNoStepMovesMakeARunVacuous) {
  Step still;
  still.after = still.weight.clone();
  const Cut cut{.axis = Axis::kTp, .weights = true};

  EXPECT_THAT(judged(kTp2, still, cut).rule, RuleIs(RuleId::kNothingMoved, {{"parameters", 1}}));
  still.after[3][5] += 1;
  EXPECT_EQ(judged(kTp2, still, cut).status, Status::kConforms);
}

TEST(NoEvidence, ZeroTensorsAndConstantParametersAreListed) {
  Step step;
  step.weight = at::ones({4, 6});
  step.activation = at::zeros({4, 6});
  const Verdict verdict = judged(kTp2, step, {.axis = Axis::kTp, .weights = true});

  EXPECT_THAT(witnesses(verdict), ElementsAre("parameter after step w (step 0)"))
      << "parts of ones are no witness";
  EXPECT_THAT(verdict.zero_tensors, ElementsAre("forward at x (step 0)"));
  EXPECT_THAT(verdict.constant_parameters, ElementsAre("w"));
  EXPECT_THAT(judged(kTp2, {}, {}).constant_parameters, IsEmpty());
}

TEST(NoEvidence, InfinitiesThatHideScoresAreNoReasonIfGradientsAreFinite) {
  Step masked;
  masked.activation[0][5] = -INFINITY;
  const Cut cut{.axis = Axis::kTp, .weights = true, .activations = true};

  EXPECT_EQ(judged(kTp2, masked, cut).status, Status::kConforms);
  masked.gradient[2][1] = INFINITY;
  EXPECT_THAT(judged(kTp2, masked, cut).rule, RuleIs(RuleId::kReferenceNotFinite, {}));
  Step nan;
  nan.activation[0][5] = NAN;
  EXPECT_THAT(judged(kTp2, nan, cut).rule,
              RuleIs(RuleId::kReferenceNotFinite, {{"tensor", "forward at x (step 0)"}}));
}

// ---- replayed steps ----

constexpr StepRule kRule = {
    .learning_rate = 1e-3, .weight_decay = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};

/// One step of AdamW in fp32, cut over tp, with noise on the gradient that no comparison with the
/// reference can see through; `rate` and `decay` are those that the step is made with.
Body adamw_step(bool is_cut, int noise, double rate = kRule.learning_rate,
                double decay = kRule.weight_decay) {
  return [=](Sink& sink, int rank) {
    const auto put = [&](RecordKind kind, const char* name, const at::Tensor& t) {
      const Layout layout = is_cut ? layout_of({4, 6}, {shard(Axis::kTp, 0)}) : layout_of({4, 6});
      const at::Tensor local = is_cut ? t.narrow(0, 2 * rank, 2) : t;
      sink.on_record(site(kind, name, layout), local.to(at::kFloat).contiguous());
    };
    const at::Tensor before = values({4, 6}, 1).to(at::kDouble);
    const at::Tensor gradient =
        values({4, 6}, 3, at::kDouble) * (1 + 0.5 * values({4, 6}, 40 + noise, at::kDouble));
    const at::Tensor m = 0.1 * gradient, v = 0.01 * gradient * gradient;
    const at::Tensor after =
        before * (1 - rate * decay) - rate * gradient / (gradient.abs() + 1e-8);
    put(RecordKind::kParam, "w", before);
    put(RecordKind::kGrad, "w", gradient);
    put(RecordKind::kOptimizer, "w.exp_avg", m);
    put(RecordKind::kOptimizer, "w.exp_avg_sq", v);
    put(RecordKind::kParam, "w", after);
  };
}

Verdict judged_step(double rate, double decay) {
  JudgePolicy policy;
  policy.step_rule = kRule;
  const Reference r = reference(
      adamw_step(false, 0), [](int i) { return adamw_step(false, 1 + i); }, 3, policy);
  // what noise hides: the parameter after the step is left to the rule alone
  policy.coarsest = Dtype::kBFloat16;
  return judge(r, run(kTp2, &r, adamw_step(true, 9, rate, decay), Keep::kEverything, policy),
               policy);
}

TEST(ReplayedSteps, ARateOrADecayThatIsNotTheRulesIsFoundInTheRunsOwnState) {
  for (const auto& [rate, decay] : {std::pair(1.01e-3, 0.1), std::pair(1e-3, 0.09)}) {
    const Verdict verdict = judged_step(rate, decay);

    ASSERT_EQ(verdict.status, Status::kDiverges) << rate << " " << decay << verdict.reason;
    EXPECT_EQ(verdict.findings.front().id, FindingId::kStepNotOfRule);
    EXPECT_THAT(verdict.findings.front().ranks, ElementsAre(0, 1));
  }
  for (const Finding& finding : judged_step(1e-3, 0.1).findings)
    ADD_FAILURE() << finding.what << " " << finding.evidence;
}

}  // namespace
}  // namespace isoshard
