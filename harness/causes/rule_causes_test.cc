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
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using namespace causes_testing;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

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
std::string steps_are(const MadeRule& rule, int from = 1) {
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
  return diagnosis_of(body(true), body(false), rule_policy());
}

std::string moment_is(
    const std::function<at::Tensor(at::Tensor before, at::Tensor gradient)>& moment, int from = 1) {
  MadeRule rule = adamw();
  rule.m = moment;
  return steps_are(rule, from);
}

TEST(RuleCauses, MomentsWithOtherFactorsAreTold) {
  EXPECT_THAT(moment_is([](const at::Tensor& m, const at::Tensor& g) {
                return kRuleBeta2 * m + (1 - kRuleBeta2) * g;
              }),
              HasSubstr("exp_avg is 0.99 x before + 0.01 x gradient, where 0.9 x before + 0.1 x "
                        "gradient is right: beta2 in the place of beta1"));
  EXPECT_THAT(
      moment_is([](const at::Tensor&, const at::Tensor& g) { return (1 - kRuleBeta2) * g; }, 0),
      HasSubstr("exp_avg is 0.01 x gradient, where 0.1 x gradient is right: beta2 in the "
                "place of beta1"));
  EXPECT_THAT(moment_is([](const at::Tensor& m, const at::Tensor& g) { return 0.8 * m + 0.1 * g; }),
              HasSubstr("exp_avg is 0.8 x before + 0.1 x gradient, where"));
  EXPECT_THAT(moment_is([](const at::Tensor& m, const at::Tensor& g) {
                return kRuleBeta2 * m + (1 - kRuleBeta2) * g +
                       1e-5 * values(kStepShape, 9, at::kDouble);
              }),
              Not(HasSubstr("is right")))
      << "something else besides";
  EXPECT_THAT(moment_is([](const at::Tensor& m, const at::Tensor& g) {
                at::Tensor all_but_one = kRuleBeta2 * m + (1 - kRuleBeta2) * g;
                set_first(all_but_one, 2e-3);
                return all_but_one;
              }),
              Not(HasSubstr("is right")));
}

TEST(RuleCauses, AGradientThatEntersWithANumberOfTheRunKeepsItsWords) {
  EXPECT_THAT(moment_is([](const at::Tensor&, const at::Tensor& g) { return 0.1 * 3 * g; }, 0),
              AllOf(HasSubstr("scale 3 = tp"), Not(HasSubstr("is right"))));
}

/// State of four numbers after two steps, on dp rank 1 as `second` makes it of the first.
std::string state_is(const std::function<at::Tensor(at::Tensor first)>& second) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor first = values({4}, 1);
      sink.on_record(site(RecordKind::kOptimizer, "m.w.exp_avg_sq", layout_of({4})), first);
      sink.begin_step(1);
      sink.on_record(site(RecordKind::kOptimizer, "m.w.exp_avg_sq", layout_of({4})),
                     whole || rank / kTp == 0 ? first * first : second(first));
    });
  };
  return diagnosis_of(body(true), body(false));
}

TEST(RuleCauses, StateThatIsAsBeforeIsTold) {
  EXPECT_THAT(state_is([](const at::Tensor& first) { return first; }),
              HasSubstr("not updated (bitwise as before) on dp rank 1"));
  EXPECT_THAT(state_is([](const at::Tensor& first) { return first * 1.0000002; }),
              Not(HasSubstr("not updated")))
      << "four numbers that are nearly so tell nothing";
}

/// A step of a parameter that the reference skips, as the flag says; `change` is what the run makes
/// of the parameter in it. A moment is there in the run alone.
std::string skipped_step_is(const std::function<at::Tensor(at::Tensor)>& change, bool has_moment,
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
  return diagnosis_of(body(true), body(false), rule_policy());
}

TEST(RuleCauses, AStepThatMustBeSkippedIsTold) {
  const std::string words = "so the step must be skipped, and it is made";
  const auto decayed = [](const at::Tensor& w) { return w * (1 - 0.02 * kRuleDecay); };

  EXPECT_THAT(skipped_step_is(decayed, false),
              AllOf(HasSubstr(words), Not(HasSubstr("applied twice"))));
  EXPECT_THAT(skipped_step_is(decayed, true),
              HasSubstr("the reference has no such state in a step whose gradients overflow"));
  EXPECT_THAT(skipped_step_is(decayed, false, 0), Not(HasSubstr(words))) << "nothing overflows";
}

std::string made_step_is(
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
              HasSubstr("another step of right moments: eps (1e-06) is inside of the root: sqrt(v "
                        "+ eps), not sqrt(v) + eps"));
  EXPECT_THAT(made_step_is([](auto old, auto m, auto v, int step) {
                return made_with(old, m, v / correction_of(kRuleBeta2, step) + kRuleEps, step,
                                 step);
              }),
              HasSubstr("the root of exp_avg_sq is missing"));
  EXPECT_THAT(made_step_is([](auto old, auto m, auto v, int step) {
                return made_with(old, m, (v / correction_of(kRuleBeta2, step)).sqrt() + 1e-4, step,
                                 step);
              }),
              HasSubstr("eps is 0.0001, not 1e-06"));
  EXPECT_THAT(made_step_is([](auto old, auto m, auto v, int step) {
                const at::Tensor root = (v / correction_of(kRuleBeta2, step)).sqrt();
                return made_with(old, m, root + 2e-4 * values(kStepShape, 8, at::kDouble).abs(),
                                 step, step);
              }),
              Not(HasSubstr("moments")))
      << "no eps does that";
  EXPECT_THAT(made_step_is([](auto old, auto m, auto v, int step) {
                at::Tensor all_but_one = made_with(
                    old, m, (v / correction_of(kRuleBeta2, step) + kRuleEps).sqrt(), step, step);
                set_first(all_but_one, 0.7);
                return all_but_one;
              }),
              Not(HasSubstr("moments")));
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

  EXPECT_THAT(told(1, correction_of(kRuleBeta2, 1)), HasSubstr("exp_avg has no bias correction"));
  EXPECT_THAT(told(correction_of(kRuleBeta1, 1), 1),
              HasSubstr("exp_avg_sq has no bias correction"));
  EXPECT_THAT(told(correction_of(kRuleBeta1, 0), correction_of(kRuleBeta2, 0)),
              HasSubstr("the bias correction is that of update 1, where this is update 2"));
  EXPECT_THAT(told(0.77, correction_of(kRuleBeta2, 1)), Not(HasSubstr("bias correction")));
}

TEST(RuleCauses, DecayAtAnotherRateIsTold) {
  const auto decayed_with = [](double rate) {
    return made_step_is([=](auto old, auto m, auto v, int step) {
      return made_with(old, m, (v / correction_of(kRuleBeta2, step)).sqrt() + kRuleEps, step,
                       step) -
             (rate - rate_in(step)) * kRuleDecay * old;
    });
  };

  EXPECT_THAT(decayed_with(kBaseRate),
              HasSubstr("weight decay 0.1 is applied with the learning rate 0.03 of the settings, "
                        "where the schedule has 0.01"));
  EXPECT_THAT(decayed_with(1), HasSubstr("weight decay 0.1 is applied with no learning rate"));
  EXPECT_THAT(decayed_with(0.02), HasSubstr("is applied twice")) << "twice the rate says more";
  EXPECT_THAT(decayed_with(0.0137), HasSubstr("applied 1.37 times"));
}

/// A parameter without gradient, `change` of which a step leaves.
std::string untrained_is(const std::function<at::Tensor(at::Tensor)>& change,
                         bool has_gradient = false, bool records_gradients = true) {
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
  return diagnosis_of(body(true), body(false), rule_policy());
}

TEST(RuleCauses, AParameterThatIsNotTrainedAndChangesIsTold) {
  const std::string fact = "it has no gradient and must stay as it was";

  EXPECT_THAT(untrained_is([](const at::Tensor& w) { return w * (1 - 0.02 * kRuleDecay); }),
              AllOf(HasSubstr("weight decay (0.02 x 0.1) of a parameter that is not trained"),
                    HasSubstr(fact)));
  EXPECT_THAT(untrained_is([](const at::Tensor& w) { return w * 0.9; }),
              HasSubstr("multiplied with 0.9: " + fact));
  EXPECT_THAT(untrained_is([](const at::Tensor& w) { return w + 0.01 * values(kStepShape, 4); }),
              AllOf(HasSubstr(fact), Not(HasSubstr("multiplied"))));
  EXPECT_THAT(untrained_is([](const at::Tensor& w) { return w * 0.9; }, true), Not(HasSubstr(fact)))
      << "it has one, of zeros";
  EXPECT_THAT(untrained_is([](const at::Tensor& w) { return w * 0.9; }, false, false),
              Not(HasSubstr(fact)))
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
  const std::string words = "the weight decay is applied behind the step";

  EXPECT_THAT(told(1), HasSubstr(words));
  EXPECT_THAT(told(1 + 1e-4), Not(HasSubstr(words))) << "something else besides";
}

/// Scales and flags of three steps, the last of which the run has otherwise.
std::string scale_is(const std::vector<double>& flags, double before, double right, double seen) {
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
  return diagnosis_of(body(true), body(false));
}

TEST(LossScaleCauses, WhatTheScaleDoesAndWhatItShouldDoAreTold) {
  EXPECT_THAT(scale_is({1, 0, 0}, 1024, 1024, 4096),
              AllOf(HasSubstr("the scale grows by 4 after 1 step without an overflow since that of "
                              "step 0, where it stays"),
                    Not(HasSubstr("stale"))))
      << "it is the scale of step 0, too";
  EXPECT_THAT(scale_is({0, 0, 0}, 1024, 2048, 1024),
              HasSubstr("the scale stays after 2 steps without an overflow, where it grows by 2"));
  EXPECT_THAT(scale_is({0, 1, 0}, 1024, 512, 256),
              HasSubstr("the scale shrinks by 0.25 after the overflow of step 1, where it shrinks "
                        "by 0.5: twice in one step"));
  EXPECT_THAT(scale_is({0, 1, 0}, 1024, 512, 300), Not(HasSubstr("twice")));
}

}  // namespace
}  // namespace isoshard
