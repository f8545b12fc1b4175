// SPDX-License-Identifier: Apache-2.0
/// Steps that follow another rule than AdamW's, on made-up runs with dp 2 and tp 3; and beside each
/// a run that looks like it and is not.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "harness/testing/diagnosed_run.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using namespace causes_testing;

constexpr double kRuleBeta1 = 0.9, kRuleBeta2 = 0.99, kRuleEps = 1e-6, kRuleDecay = 0.1,
                 kBaseRate = 0.03;

JudgePolicy rule_policy() {
  JudgePolicy policy;
  policy.step_rule = StepRule{kBaseRate, kRuleDecay, kRuleBeta1, kRuleBeta2, kRuleEps};
  return policy;
}
const Shape kStepShape = {6, 8};

double rate_in(int step) {
  return step == 0 ? 0.02 : 0.01;
}

/// What one step makes; each may be changed in a run that is to be wrong.
struct MadeRule {
  std::function<at::Tensor(at::Tensor before, at::Tensor gradient)> m, v;
  std::function<at::Tensor(at::Tensor old, at::Tensor m, at::Tensor v, int step)> after;
};

double correction_of(double beta, int step) {
  return 1 - std::pow(beta, step + 1);
}

at::Tensor made_with(const at::Tensor& old, const at::Tensor& m, const at::Tensor& denominator,
                     int step, int updates) {
  return old * (1 - rate_in(step) * kRuleDecay) -
         rate_in(step) / correction_of(kRuleBeta1, updates) * m / denominator;
}

MadeRule adamw() {
  return {[](const at::Tensor& m, const at::Tensor& g) {
            return kRuleBeta1 * m + (1 - kRuleBeta1) * g;
          },
          [](const at::Tensor& v, const at::Tensor& g) {
            return kRuleBeta2 * v + (1 - kRuleBeta2) * g * g;
          },
          [](const at::Tensor& old, const at::Tensor& m, const at::Tensor& v, int step) {
            return made_with(old, m, (v / correction_of(kRuleBeta2, step)).sqrt() + kRuleEps, step,
                             step);
          }};
}

/// Two steps, which the run makes as `rule` says from `from` on.
Cause steps_are(const MadeRule& rule, int from = 1) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const auto record = [&](RecordKind kind, const std::string& name, const at::Tensor& value) {
        sink.on_record(site(kind, name, layout_of(value.sizes().vec())), value.to(at::kFloat));
      };
      at::Tensor p = values(kStepShape, 1, at::kDouble), m = at::zeros_like(p), v = m;
      record(RecordKind::kParam, "m.w", p);
      for (int step = 0; step < 2; ++step) {
        if (step > 0) sink.begin_step(step);
        const MadeRule own = whole || step < from ? adamw() : rule;
        const at::Tensor g = 1e-3 * values(kStepShape, 7 + step, at::kDouble);
        sink.on_record(site(RecordKind::kScalar, "learning_rate", layout_of({1})),
                       at::tensor({rate_in(step)}, at::kDouble));
        record(RecordKind::kGrad, "m.w", g);
        m = own.m(m, g);
        v = own.v(v, g);
        p = own.after(p, m, v, step);
        record(RecordKind::kOptimizer, "m.w.exp_avg", m);
        record(RecordKind::kOptimizer, "m.w.exp_avg_sq", v);
        record(RecordKind::kParam, "m.w", p);
      }
    });
  };
  return cause_of(body(true), body(false), rule_policy());
}

Cause moment_is(const std::function<at::Tensor(at::Tensor before, at::Tensor gradient)>& moment,
                int from = 1) {
  MadeRule rule = adamw();
  rule.m = moment;
  return steps_are(rule, from);
}

// 0.1 (1 - beta1) of a gradient that is clipped to a tenth is 0.01 (1 - beta2) of the right one.
TEST(RuleCauses, MomentsOfASmallerGradientHaveNoOtherBeta) {
  MadeRule rule = adamw();
  rule.m = [](const at::Tensor& m, const at::Tensor& g) { return adamw().m(m, 0.1 * g); };
  EXPECT_THAT(steps_are(rule, 0), IsCause(CauseId::kMomentWithOtherBeta)) << "the other is right";

  rule.v = [](const at::Tensor& v, const at::Tensor& g) { return adamw().v(v, 0.1 * g); };
  EXPECT_THAT(steps_are(rule, 0), testing::Not(IsCause(CauseId::kMomentWithOtherBeta)));
}

TEST(RuleCauses, MomentsWithOtherFactorsAreTold) {
  EXPECT_THAT(moment_is([](const at::Tensor& m, const at::Tensor& g) {
                return kRuleBeta2 * m + (1 - kRuleBeta2) * g;
              }),
              IsCause(CauseId::kMomentWithOtherBeta, {{"state", "exp_avg"},
                                                      {"gradient_factor", 0.01},
                                                      {"right_gradient_factor", 0.1},
                                                      {"before_factor", 0.99},
                                                      {"right_before_factor", 0.9},
                                                      {"used_beta", 2},
                                                      {"own_beta", 1}}));
  EXPECT_THAT(
      moment_is([](const at::Tensor&, const at::Tensor& g) { return (1 - kRuleBeta2) * g; }, 0),
      IsCause(CauseId::kMomentWithOtherBeta, {{"state", "exp_avg"},
                                              {"gradient_factor", 0.01},
                                              {"right_gradient_factor", 0.1},
                                              {"used_beta", 2},
                                              {"own_beta", 1}}));
  EXPECT_THAT(moment_is([](const at::Tensor& m, const at::Tensor& g) { return 0.8 * m + 0.1 * g; }),
              IsCause(CauseId::kMomentWithOtherFactors, {{"state", "exp_avg"},
                                                         {"gradient_factor", 0.1},
                                                         {"right_gradient_factor", 0.1},
                                                         {"before_factor", 0.8},
                                                         {"right_before_factor", 0.9}}));
  EXPECT_THAT(moment_is([](const at::Tensor& m, const at::Tensor& g) {
                return kRuleBeta2 * m + (1 - kRuleBeta2) * g +
                       1e-5 * values(kStepShape, 9, at::kDouble);
              }),
              IsNoCause())
      << "something else besides";
  EXPECT_THAT(moment_is([](const at::Tensor& m, const at::Tensor& g) {
                at::Tensor all_but_one = kRuleBeta2 * m + (1 - kRuleBeta2) * g;
                set_first(all_but_one, 2e-3);
                return all_but_one;
              }),
              IsNoCause());
}

TEST(RuleCauses, AGradientThatEntersWithANumberOfTheRunKeepsItsWords) {
  EXPECT_THAT(moment_is([](const at::Tensor&, const at::Tensor& g) { return 0.1 * 3 * g; }, 0),
              IsCause(CauseId::kScaleOfFormula, {{"formula", "tp"}, {"scale", 3}}));
}

/// State of four numbers after two steps, on dp rank 1 as `second` makes it of the first.
Cause state_is(const std::function<at::Tensor(at::Tensor first)>& second) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor first = values({4}, 1);
      sink.on_record(site(RecordKind::kOptimizer, "m.w.exp_avg_sq", layout_of({4})), first);
      sink.begin_step(1);
      sink.on_record(site(RecordKind::kOptimizer, "m.w.exp_avg_sq", layout_of({4})),
                     whole || rank / kTp == 0 ? first * first : second(first));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(RuleCauses, StateThatIsAsBeforeIsTold) {
  EXPECT_THAT(state_is([](const at::Tensor& first) { return first; }),
              IsCause(CauseId::kNotUpdated, {{"ranks", std::vector{3, 4, 5}}}));
  EXPECT_THAT(state_is([](const at::Tensor& first) { return first * 1.0000002; }),
              IsCause(CauseId::kCopiesDifferOverAxes, {{"axes", std::vector{"dp"}}}))
      << "four numbers that are nearly so tell nothing";
}

/// A step of a parameter that the reference skips, as the flag says; `change` is what the run makes
/// of the parameter in it. A moment is there in the run alone.
Cause skipped_step_is(const std::function<at::Tensor(at::Tensor)>& change, bool has_moment,
                      double flag = 1) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const at::Tensor value = values(kStepShape, 1);
      const Layout layout = layout_of(kStepShape);
      sink.on_record(site(RecordKind::kParam, "m.w", layout), value);
      sink.on_record(site(RecordKind::kScalar, "learning_rate", layout_of({1})),
                     at::tensor({0.02}, at::kDouble));
      sink.on_record(site(RecordKind::kScalar, "found_inf", layout_of({1})),
                     at::tensor({flag}, at::kDouble));
      if (has_moment && !whole)
        sink.on_record(site(RecordKind::kOptimizer, "m.w.exp_avg", layout), at::zeros(kStepShape));
      sink.on_record(site(RecordKind::kParam, "m.w", layout), whole ? value : change(value));
    });
  };
  return cause_of(body(true), body(false), rule_policy());
}

TEST(RuleCauses, AStepThatMustBeSkippedIsTold) {
  const auto decayed = [](const at::Tensor& w) { return w * (1 - 0.02 * kRuleDecay); };

  EXPECT_THAT(skipped_step_is(decayed, false), IsCause(CauseId::kStepNotSkipped));
  EXPECT_THAT(skipped_step_is(decayed, true), IsCause(CauseId::kStateOfSkippedStep));
  EXPECT_THAT(skipped_step_is(decayed, false, 0), IsCause(CauseId::kScale, {{"scale", 0.998}}))
      << "nothing overflows";
}

Cause made_step_is(
    const std::function<at::Tensor(at::Tensor old, at::Tensor m, at::Tensor v, int step)>& after) {
  MadeRule rule = adamw();
  rule.after = after;
  return steps_are(rule);
}

TEST(RuleCauses, AnotherStepOfRightMomentsIsTold) {
  EXPECT_THAT(made_step_is([](auto old, auto m, auto v, int step) {
                return made_with(old, m, (v / correction_of(kRuleBeta2, step) + kRuleEps).sqrt(),
                                 step, step);
              }),
              IsCause(CauseId::kEpsInsideRoot, {{"eps", 1e-06}}));
  EXPECT_THAT(made_step_is([](auto old, auto m, auto v, int step) {
                return made_with(old, m, v / correction_of(kRuleBeta2, step) + kRuleEps, step,
                                 step);
              }),
              IsCause(CauseId::kRootMissing));
  EXPECT_THAT(made_step_is([](auto old, auto m, auto v, int step) {
                return made_with(old, m, (v / correction_of(kRuleBeta2, step)).sqrt() + 1e-4, step,
                                 step);
              }),
              IsCause(CauseId::kOtherEps, {{"used", 0.0001}, {"eps", 1e-06}}));
  EXPECT_THAT(made_step_is([](auto old, auto m, auto v, int step) {
                const at::Tensor root = (v / correction_of(kRuleBeta2, step)).sqrt();
                return made_with(old, m, root + 2e-4 * values(kStepShape, 8, at::kDouble).abs(),
                                 step, step);
              }),
              IsNoCause())
      << "no eps does that";
  EXPECT_THAT(made_step_is([](auto old, auto m, auto v, int step) {
                at::Tensor all_but_one = made_with(
                    old, m, (v / correction_of(kRuleBeta2, step) + kRuleEps).sqrt(), step, step);
                set_first(all_but_one, 0.7);
                return all_but_one;
              }),
              IsNoCause());
}

TEST(RuleCauses, ABiasCorrectionThatIsAnotherIsTold) {
  const auto without_decay = [](const at::Tensor& old, const at::Tensor& m, const at::Tensor& v,
                                double correction1, double correction2, int step) {
    return old * (1 - rate_in(step) * kRuleDecay) -
           rate_in(step) / correction1 * m / ((v / correction2).sqrt() + kRuleEps);
  };
  const auto told = [&](double correction1, double correction2) {
    return made_step_is([=](auto old, auto m, auto v, int step) {
      return without_decay(old, m, v, correction1, correction2, step);
    });
  };

  EXPECT_THAT(told(1, correction_of(kRuleBeta2, 1)), IsCause(CauseId::kFirstMomentUncorrected));
  EXPECT_THAT(told(correction_of(kRuleBeta1, 1), 1), IsCause(CauseId::kSecondMomentUncorrected));
  EXPECT_THAT(told(correction_of(kRuleBeta1, 0), correction_of(kRuleBeta2, 0)),
              IsCause(CauseId::kCorrectionOfOtherUpdate, {{"used", 1}, {"update", 2}}));
  EXPECT_THAT(told(0.77, correction_of(kRuleBeta2, 1)), IsNoCause());
}

TEST(RuleCauses, DecayAtAnotherRateIsTold) {
  const auto decayed_with = [](double rate) {
    return made_step_is([=](auto old, auto m, auto v, int step) {
      return made_with(old, m, (v / correction_of(kRuleBeta2, step)).sqrt() + kRuleEps, step,
                       step) -
             (rate - rate_in(step)) * kRuleDecay * old;
    });
  };

  EXPECT_THAT(decayed_with(kBaseRate), IsCause(CauseId::kDecayWithRateOfSettings,
                                               {{"decay", 0.1}, {"used", 0.03}, {"rate", 0.01}}));
  EXPECT_THAT(decayed_with(1), IsCause(CauseId::kDecayWithoutRate, {{"decay", 0.1}}));
  EXPECT_THAT(decayed_with(0.02), IsCause(CauseId::kDecayAppliedTwice, {{"times", 2}}))
      << "twice the rate says more";
  EXPECT_THAT(decayed_with(0.0137), IsCause(CauseId::kDecayAppliedTimes, {{"times", 1.37}}));
}

/// A parameter without gradient, `change` of which a step leaves.
Cause untrained_is(const std::function<at::Tensor(at::Tensor)>& change, bool has_gradient = false,
                   bool records_gradients = true) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const at::Tensor value = values(kStepShape, 1);
      const Layout layout = layout_of(kStepShape);
      sink.on_record(site(RecordKind::kParam, "m.w", layout), value);
      sink.on_record(site(RecordKind::kScalar, "learning_rate", layout_of({1})),
                     at::tensor({0.02}, at::kDouble));
      if (has_gradient)
        sink.on_record(site(RecordKind::kGrad, "m.w", layout), at::zeros_like(value));
      if (records_gradients)
        sink.on_record(site(RecordKind::kGrad, "m.trained", layout_of({3})), values({3}, 2));
      sink.on_record(site(RecordKind::kParam, "m.w", layout), whole ? value : change(value));
    });
  };
  return cause_of(body(true), body(false), rule_policy());
}

TEST(RuleCauses, AParameterThatIsNotTrainedAndChangesIsTold) {
  EXPECT_THAT(untrained_is([](const at::Tensor& w) { return w * (1 - 0.02 * kRuleDecay); }),
              IsCause(CauseId::kUntrainedDecayed, {{"rate", 0.02}, {"decay", 0.1}}));
  EXPECT_THAT(untrained_is([](const at::Tensor& w) { return w * 0.9; }),
              IsCause(CauseId::kUntrainedScaled, {{"factor", 0.9}}));
  EXPECT_THAT(untrained_is([](const at::Tensor& w) { return w + 0.01 * values(kStepShape, 4); }),
              IsCause(CauseId::kUntrainedChanged));
  EXPECT_THAT(untrained_is([](const at::Tensor& w) { return w * 0.9; }, true),
              IsCause(CauseId::kDecayAppliedTimes, {{"times", 51}}))
      << "it has one, of zeros";
  EXPECT_THAT(untrained_is([](const at::Tensor& w) { return w * 0.9; }, false, false),
              IsCause(CauseId::kScale, {{"scale", 0.9}}))
      << "nobody recorded gradients";
}

TEST(RuleCauses, ADecayBehindTheStepIsTold) {
  const auto told = [](double factor) {
    return made_step_is([=](auto old, auto m, auto v, int step) {
      const at::Tensor root = (v / correction_of(kRuleBeta2, step)).sqrt() + kRuleEps;
      const double kept = 1 - rate_in(step) * kRuleDecay;
      const at::Tensor stepped = old - rate_in(step) / correction_of(kRuleBeta1, step) * m / root;
      return stepped * kept * factor;
    });
  };

  EXPECT_THAT(told(1), IsCause(CauseId::kDecayBehindStep));
  EXPECT_THAT(told(1 + 1e-4), IsNoCause()) << "something else besides";
}

/// Scales and flags of three steps, the last of which the run has otherwise.
Cause scale_is(const std::vector<double>& flags, double before, double right, double seen) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const auto number = [&](const char* name, double value) {
        sink.on_record(site(RecordKind::kScalar, name, layout_of({1})),
                       at::tensor({value}, at::kDouble));
      };
      for (int step = 0; step < 3; ++step) {
        if (step > 0) sink.begin_step(step);
        number("loss_scale", step < 2 ? before * (step == 0 ? 4 : 1) : whole ? right : seen);
        number("found_inf", flags.at(static_cast<std::size_t>(step)));
      }
    });
  };
  return cause_of(body(true), body(false));
}

TEST(LossScaleCauses, WhatTheScaleDoesAndWhatItShouldDoAreTold) {
  EXPECT_THAT(
      scale_is({1, 0, 0}, 1024, 1024, 4096),
      IsCause(CauseId::kLossScaleWithoutOverflow,
              {{"factor", 4}, {"expected_factor", 1}, {"overflow_step", 0}, {"good_steps", 1}}))
      << "it is the scale of step 0, too";
  EXPECT_THAT(scale_is({0, 0, 0}, 1024, 2048, 1024),
              IsCause(CauseId::kLossScaleWithoutOverflow,
                      {{"expected_factor", 2}, {"good_steps", 2}, {"factor", 1}}));
  EXPECT_THAT(scale_is({0, 1, 0}, 1024, 512, 256),
              IsCause(CauseId::kLossScaleChangedTwice,
                      {{"factor", 0.25}, {"expected_factor", 0.5}, {"overflow_step", 1}}));
  EXPECT_THAT(scale_is({0, 1, 0}, 1024, 512, 300), IsCause(CauseId::kLossScaleAfterOverflow));
}

/// The nearest matrix with orthogonal rows or columns.
at::Tensor orthogonalized(const at::Tensor& matrix) {
  const auto [u, sigma, v] = at::linalg_svd(matrix, /*full_matrices=*/false);
  return at::matmul(u, v);
}

/// A step that is `made_of` the gradient of a matrix whose rows the dp ranks share. The run has
/// each rank make it of its own rows, unless it is `right` or multiplied by a factor.
Cause matrix_step_is(const std::function<at::Tensor(const at::Tensor&)>& made_of, bool is_of_parts,
                     double factor = 1) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const int dp = rank / kTp;
      const std::vector<Placement> split =
          whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
      const auto record = [&](RecordKind kind, const at::Tensor& value) {
        sink.on_record(site(kind, "m.w", layout_of({8, 6}, split)),
                       (whole ? value : value.narrow(0, 4 * dp, 4)).to(at::kFloat));
      };
      const at::Tensor p = values({8, 6}, 1, at::kDouble), g = values({8, 6}, 7, at::kDouble);
      record(RecordKind::kParam, p);
      record(RecordKind::kGrad, g);
      at::Tensor step = made_of(g);
      if (!whole && is_of_parts)
        step = at::cat({made_of(g.narrow(0, 0, 4)), made_of(g.narrow(0, 4, 4))});
      record(RecordKind::kParam, p - (whole ? 0.1 : 0.1 * factor) * step);
    });
  };
  return cause_of(body(true), body(false));
}

TEST(RuleCauses, AStepOfEachRanksOwnMatrixIsTold) {
  EXPECT_THAT(matrix_step_is(orthogonalized, true), IsCause(CauseId::kStepOfOwnMatrix));

  const auto is_not = testing::Not(IsCause(CauseId::kStepOfOwnMatrix));
  EXPECT_THAT(matrix_step_is(orthogonalized, false, 1.5), is_not) << "a factor";
  const auto plain = [](const at::Tensor& g) { return g; };
  EXPECT_THAT(matrix_step_is(plain, true, 1.5), is_not) << "SGD with a factor";
  const auto of_signs = [](const at::Tensor& g) { return g.sign(); };
  EXPECT_THAT(matrix_step_is(of_signs, true, 1.5), is_not) << "element by element";
}

}  // namespace
}  // namespace isoshard
