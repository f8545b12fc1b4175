// SPDX-License-Identifier: Apache-2.0
/// Each class of causes on made-up runs with dp 2 and tp 3, and beside each a run that looks like
/// it and is not: it must not be given that cause.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "harness/ids/phrase.h"
#include "harness/judge/judge.h"
#include "harness/testing/diagnosed_run.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using namespace causes_testing;

// ---- values of another time

/// Activations of two micro-batches in each of two steps; `change` makes those of the last one from
/// all that came before.
Body passes(
    const std::function<at::Tensor(std::vector<at::Tensor> before, at::Tensor right)>& change,
    bool whole) {
  return [=](Sink& sink, int) {
    std::vector<at::Tensor> before;
    for (int i = 0; i < 4; ++i) {
      if (i == 2) sink.begin_step(1);
      const at::Tensor right = values({2, 3, 4}, i + 1);
      const at::Tensor own = !whole && i == 3 ? change(before, right) : right;
      sink.on_record(site(RecordKind::kActivation, "m.x", layout_of({2, 3, 4})), own);
      before.push_back(right);
    }
  };
}

Cause last_pass_is(const std::function<at::Tensor(std::vector<at::Tensor>, at::Tensor)>& change) {
  return cause_of(passes(change, true), passes(change, false));
}

TEST(ClassCauses, ValuesOfAnotherStepOrMicroBatchAreTold) {
  EXPECT_THAT(last_pass_is([](auto before, auto) { return before[2]; }),
              IsCause(CauseId::kValuesOfMicroBatch, {{"micro_batch", 1}, {"other", 0}}));
  EXPECT_THAT(last_pass_is([](auto before, auto) { return before[1]; }),
              IsCause(CauseId::kStaleBySteps, {{"steps", 1}}));
  EXPECT_THAT(last_pass_is([](auto before, auto right) {
                at::Tensor all_but_one = before[2].clone();
                all_but_one.view({-1}).select(0, 5).copy_(right.view({-1}).select(0, 5));
                return all_but_one;
              }),
              IsNoCause())
      << "one element is right";
  EXPECT_THAT(last_pass_is([](auto, auto right) { return at::zeros_like(right); }),
              IsCause(CauseId::kScale, {{"scale", 0}}));
}

TEST(ClassCauses, ConstantsAreNotStale) {
  const auto body = [](double second) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kActivation, "m.x", layout_of({32})), at::ones({32}));
      sink.begin_step(1);
      sink.on_record(site(RecordKind::kActivation, "m.x", layout_of({32})), at::full({32}, second));
    });
  };

  EXPECT_THAT(cause_of(body(2), body(1)),
              IsCause(CauseId::kScaleOfFormula, {{"formula", "1/dp"}, {"scale", 0.5}}));
}

TEST(ClassCauses, ANumberIsStaleOnlyIfItIsThatNumber) {
  const auto body = [](double second) {
    return Body([=](Sink& sink, int) {
      const auto norm = [&](double value) {
        sink.on_record(site(RecordKind::kScalar, "grad_norm", layout_of({1})),
                       at::tensor({value}, at::kDouble));
      };
      norm(3.25);
      sink.begin_step(1);
      norm(second);
    });
  };

  EXPECT_THAT(cause_of(body(4.5), body(3.25)), IsCause(CauseId::kStaleBySteps, {{"steps", 1}}));
  EXPECT_THAT(cause_of(body(4.5), body(3.26)),
              IsCause(CauseId::kNumberOff, {{"offset", -1.24}, {"scale", 3.26 / 4.5}}));
  EXPECT_THAT(cause_of(body(3.2501), body(3.25)), IsCause(CauseId::kNumberOff))
      << "too near to the right one";
}

TEST(ClassCauses, ANumberHasAFactorAndAnOffsetAsAlternatives) {
  const auto body = [](const std::vector<double>& of_ranks) {
    return Body([=](Sink& sink, int rank) {
      const auto place = static_cast<std::size_t>(rank) % of_ranks.size();
      sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                     at::tensor({of_ranks[place]}, at::kDouble));
    });
  };

  const Cause over_dp = cause_of(body({4}), body({4, 4, 4, 4.28, 4.28, 4.28}));
  EXPECT_THAT(over_dp, IsCause(CauseId::kNumberOff, {{"offset", 0.28},
                                                     {"scale", 1.07},
                                                     {"ranks", std::vector{3, 4, 5}},
                                                     {"axes", std::vector{"dp"}}}));
  const std::string differing = phrase(PhraseId::kCopiesDifferOver, {{"axes", std::vector{"dp"}}});
  EXPECT_TRUE(over_dp.text.starts_with(differing)) << over_dp.text;
  const Cause everywhere = cause_of(body({4}), body({4.28}));
  EXPECT_THAT(everywhere, IsCause(CauseId::kNumberOff, {{"offset", 0.28}, {"scale", 1.07}}));
  EXPECT_THAT(everywhere, HasNoValue("axes"));
  EXPECT_THAT(cause_of(body({4}), body({4.3, 4.28, 4.26, 4.3, 4.28, 4.26})),
              IsCause(CauseId::kNumbersOff));
  EXPECT_THAT(cause_of(body({4}), body({3.9, 3.9, 3.9, 4.1, 4.1, 4.1})),
              IsCause(CauseId::kRankLocal, {{"axis", "dp"}}))
      << "their mean is right";
}

/// The gradient of one parameter in two steps; `change` gets the earlier and the right one. The
/// parameter was 0 at first, as biases are, so it is a multiple of the earlier gradient.
Cause second_gradient_is(
    const std::function<at::Tensor(at::Tensor before, at::Tensor right)>& change) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      const at::Tensor before = values({6, 8}, 1), right = values({6, 8}, 2);
      sink.on_record(site(RecordKind::kParam, "m.w", layout_of({6, 8})), at::zeros({6, 8}));
      sink.on_record(site(RecordKind::kGrad, "m.w", layout_of({6, 8})), before);
      sink.on_record(site(RecordKind::kParam, "m.w", layout_of({6, 8})), -0.1 * before);
      sink.begin_step(1);
      sink.on_record(site(RecordKind::kGrad, "m.w", layout_of({6, 8})),
                     whole ? right : change(before, right));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, AnEarlierGradientThatWasNotClearedIsTold) {
  EXPECT_THAT(second_gradient_is([](auto before, auto right) { return right + before; }),
              IsCause(CauseId::kNotCleared, {{"step", 0}, {"times", 1}}));
  EXPECT_THAT(second_gradient_is([](auto before, auto right) { return right + 0.125 * before; }),
              IsCause(CauseId::kNotCleared, {{"times", 0.125}, {"step", 0}}))
      << "it was clipped where it lies";
  EXPECT_THAT(second_gradient_is([](auto before, auto right) {
                at::Tensor all_but_one = right + before;
                set_first(all_but_one, 5);
                return all_but_one;
              }),
              IsNoCause());
  EXPECT_THAT(second_gradient_is([](auto, auto right) {
                return right + values({6, 8}, 3);
              }),
              IsNoCause());
}

/// Masks of 4 samples in two micro-batches of two steps; `change` makes the last from all before.
Cause last_mask_is(
    const std::function<at::Tensor(std::vector<at::Tensor> before, at::Tensor right)>& change) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      std::vector<at::Tensor> before;
      for (int i = 0; i < 4; ++i) {
        if (i == 2) sink.begin_step(1);
        const at::Tensor right = values({4, 5, 16}, i + 1) > -0.5;
        sink.on_record(site(RecordKind::kMask, "drop", layout_of({4, 5, 16})),
                       !whole && i == 3 ? change(before, right) : right);
        before.push_back(right);
      }
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, MasksOfOtherPlacesAreTold) {
  EXPECT_THAT(
      last_mask_is([](auto before, auto) { return before[2]; }),
      IsCause(
          CauseId::kMasksOfMicroBatch,
          {{"samples", std::vector{0, 1, 2, 3}}, {"micro_batch", 1}, {"other", 0}, {"step", 1}}));
  EXPECT_THAT(
      last_mask_is([](auto before, auto) { return before[1]; }),
      IsCause(
          CauseId::kMasksOfMicroBatch,
          {{"samples", std::vector{0, 1, 2, 3}}, {"micro_batch", 1}, {"other", 1}, {"step", 0}}));
  EXPECT_THAT(last_mask_is([](auto before, auto right) {
                return at::cat({before[2].narrow(0, 2, 2), right.narrow(0, 2, 2)});
              }),
              IsCause(CauseId::kMasksOfSamples, {{"samples", std::vector{0, 1}},
                                                 {"micro_batch", 1},
                                                 {"other", 0},
                                                 {"step", 1},
                                                 {"other_samples", std::vector{2, 3}}}));
  EXPECT_THAT(last_mask_is([](auto, auto) {
                return values({4, 5, 16}, 9) > -0.5;
              }),
              IsNoCause())
      << "they are nobody's";
  EXPECT_THAT(last_mask_is([](auto, auto right) { return at::ones_like(right); }), IsNoCause());
}

// ---- steps of parameters

/// A parameter before and after a step with its gradient; `change` makes what the run has after it.
Body stepped(const at::Tensor& before, const RankChange& change, bool whole) {
  return [=](Sink& sink, int rank) {
    const at::Tensor gradient = values(before.sizes().vec(), 7), after = before - 0.01 * gradient;
    const Layout layout = layout_of(before.sizes().vec());
    sink.on_record(site(RecordKind::kParam, "m.w", layout), before);
    sink.on_record(site(RecordKind::kGrad, "m.w", layout), gradient);
    sink.on_record(site(RecordKind::kParam, "m.w", layout), changed(change, after, rank, whole));
  };
}

Cause step_is(const at::Tensor& before, const RankChange& change, double decay = 0) {
  JudgePolicy policy;
  if (decay != 0) policy.step_rule = StepRule{.learning_rate = 0.01, .weight_decay = decay};
  return cause_of(stepped(before, change, true), stepped(before, change, false), policy);
}

TEST(ClassCauses, APartThatIsNotUpdatedIsNamed) {
  const at::Tensor before = values({8, 12}, 1);

  EXPECT_THAT(step_is(before,
                      [&](at::Tensor after, int, int) {
                        after.narrow(0, 4, 3).copy_(before.narrow(0, 4, 3));
                        return after;
                      }),
              IsCause(CauseId::kRowsNotUpdated, {{"rows", std::vector{4, 5, 6}}}));
  EXPECT_THAT(step_is(before,
                      [&](at::Tensor after, int, int tp) {
                        if (tp == 2) after.narrow(1, 10, 2).copy_(before.narrow(1, 10, 2));
                        return after;
                      }),
              IsCause(CauseId::kColumnsNotUpdated,
                      {{"columns", std::vector{10, 11}}, {"ranks", std::vector{2, 5}}}));
  EXPECT_THAT(
      step_is(before, [&](at::Tensor after, int, int tp) { return tp == 1 ? before : after; }),
      IsCause(CauseId::kNotUpdated, {{"ranks", std::vector{1, 4}}}));
}

TEST(ClassCauses, AStepThatIsHalfMadeIsNotLeftOut) {
  const at::Tensor before = values({8, 12}, 1);

  EXPECT_THAT(step_is(before,
                      [&](at::Tensor after, int, int) {
                        const at::Tensor half =
                            (before.narrow(0, 4, 3) + after.narrow(0, 4, 3)) / 2;
                        after.narrow(0, 4, 3).copy_(half);
                        return after;
                      }),
              IsCause(CauseId::kPartScaled, {{"base", "step"}, {"dim", 0}, {"first", 4}}));
  EXPECT_THAT(step_is(before,
                      [&](at::Tensor after, int, int) {
                        const at::Tensor near =
                            before.narrow(0, 4, 1).narrow(1, 0, 3) * (1 + 0x1p-22);
                        after.narrow(0, 4, 1).narrow(1, 0, 3).copy_(near);
                        return after;
                      }),
              IsCause(CauseId::kPartScaled, {{"base", "step"}, {"first", 48}, {"scale", 0}}))
      << "three elements that are nearly as before are too few";
}

TEST(ClassCauses, WeightDecayThatIsLeftOutOrDoubledIsTold) {
  const at::Tensor before = values({8, 12}, 1);
  const auto decayed = [&](double times) {  // the reference has it once, within `after`
    return step_is(
        before,
        [&](at::Tensor after, int, int) { return after + (1 - times) * 0.01 * 0.1 * before; }, 0.1);
  };

  EXPECT_THAT(decayed(0), IsCause(CauseId::kDecayLeftOut, {{"rate", 0.01}, {"decay", 0.1}}));
  EXPECT_THAT(decayed(2), IsCause(CauseId::kDecayAppliedTwice, {{"rate", 0.01}, {"decay", 0.1}}));
  EXPECT_THAT(step_is(
                  before,
                  [&](at::Tensor after, int, int) {
                    at::Tensor all_but_one = after + 0.01 * 0.1 * before;
                    set_first(all_but_one, after.view({-1})[0].item<double>());
                    return all_but_one;
                  },
                  0.1),
              IsNoCause());
  EXPECT_THAT(step_is(
                  at::zeros({8, 12}), [](at::Tensor after, int, int) { return after + 1e-3; }, 0.1),
              IsCause(CauseId::kConstantOffset))
      << "zeros do not decay";
}

// ---- rounding

// ---- factors

Cause factors_are(const std::vector<double>& of_tp, bool all_but_one = false) {
  const at::Tensor value = values({6, 8}, 1);
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const auto own = static_cast<std::size_t>(rank % kTp);
      at::Tensor part = value.narrow(0, 2 * static_cast<std::int64_t>(own), 2).clone();
      if (!whole) part.mul_(of_tp[own]);
      if (!whole && all_but_one && own == 1) set_first(part, 0.5);
      sink.on_record(site(RecordKind::kGrad, "m.w",
                          layout_of({6, 8}, whole ? std::vector<Placement>{}
                                                  : std::vector<Placement>{shard(Axis::kTp, 0)})),
                     whole ? value : part);
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, OneFactorForEachRankIsListed) {
  EXPECT_THAT(factors_are({1, 0.75, 0.6}),
              IsCause(CauseId::kFactorPerRank, {{"axis", "tp"},
                                                {"factors", std::vector{1.0, 0.75, 0.6}},
                                                {"ranks", std::vector{1, 2, 4, 5}}}));
  EXPECT_THAT(factors_are({1, 2, 3}),
              IsCause(CauseId::kScaledByRankPlusOne, {{"axis", "tp"},
                                                      {"degree", 3},
                                                      {"factors", std::vector{1.0, 2.0, 3.0}},
                                                      {"ranks", std::vector{1, 2, 4, 5}}}));
  EXPECT_THAT(factors_are({0.7, 0.75, 0.6}, true), IsNoCause())
      << "rank 1's does not hold for one element, and rank 0's not for the other ranks";
  EXPECT_THAT(factors_are({1, 0.75, 0.75}), IsCause(CauseId::kScale, {{"scale", 0.75}}))
      << "one factor, which two ranks share";
}

// Each rank clips the same gradient by a norm of its own. That their mean gives the reference, too,
// is no sign of summands: it holds for any multiples of one tensor.
TEST(ClassCauses, CopiesThatAreMultiplesOfEachOtherAreNoSummands) {
  const auto factors_of_copies = [](std::vector<double> of_tp, const at::Tensor& value) {
    return cause_of_one(RecordKind::kGrad, value, [of_tp](at::Tensor v, int, int tp) {
      return v * of_tp[static_cast<std::size_t>(tp)];
    });
  };
  const at::Tensor value = values({6, 8}, 1);

  EXPECT_THAT(
      factors_of_copies({0.9, 0.75, 0.6}, value),
      IsCause(CauseId::kFactorPerRank, {{"axis", "tp"}, {"factors", std::vector{0.9, 0.75, 0.6}}}));
  EXPECT_THAT(factors_of_copies({0.5, 0.3, 0.2}, value), IsCause(CauseId::kFactorPerRank));
  EXPECT_THAT(factors_of_copies({1 + 1e-8, 1.7, 1.7}, value),
              IsCause(CauseId::kScale, {{"scale", 1.7}, {"ranks", std::vector{1, 2, 4, 5}}}));
  EXPECT_THAT(factors_of_copies({0.5, 0.3, 0.2}, at::tensor({0.25, -0.25})),
              IsCause(CauseId::kRankLocalPartial, {{"axis", "tp"}}))
      << "summands of two classes' scores are always multiples of (1, -1)";
}

/// An activation's gradient of two dp ranks whose samples have 3 and 1 targets.
Cause dp_factors_are(double first, double second) {
  const at::Tensor value = values({2, 4, 6}, 1),
                   labels = at::tensor({9, 1, 2, 3, 9, 4, -100, -100}, at::kLong).reshape({2, 4});
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const int dp = rank / kTp;
      const std::vector<Placement> split =
          whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
      sink.on_record(site(RecordKind::kDataId, "labels", layout_of({2, 4}, split)),
                     whole ? labels : labels.narrow(0, dp, 1));
      sink.on_record(site(RecordKind::kActivationGrad, "m.x", layout_of({2, 4, 6}, split)),
                     whole ? value : value.narrow(0, dp, 1) * (dp == 0 ? first : second));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, FactorsThatAreTokenCountsAreNamed) {
  EXPECT_THAT(dp_factors_are(4.0 / 6, 4.0 / 2),
              IsCause(CauseId::kDividesByOwnCount, {{"axis", "dp"},
                                                    {"degree", 2},
                                                    {"factors", std::vector{0.6667, 2.0}},
                                                    {"token_counts", std::vector{3.0, 1.0}}}));
  EXPECT_THAT(dp_factors_are(0.67, 1.9), IsCause(CauseId::kFactorPerRank));
}

/// What backward begins from on two dp ranks with 3 targets of loss 2 and 1 target of loss 4: each
/// has its part of the mean over all 4 tokens, times a factor.
Cause backward_factors_are(double first, double second) {
  const at::Tensor labels = at::tensor({9, 1, 2, 3, 9, 4, -100, -100}, at::kLong).reshape({2, 4});
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const int dp = rank / kTp;
      const std::vector<Placement> split =
          whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
      const std::vector<Placement> average =
          whole ? std::vector<Placement>{}
                : std::vector<Placement>{partial(Axis::kDp, Reduction::kAvg)};
      const double part = dp == 0 ? first * 2 * 2 * 0.75 : second * 2 * 4 * 0.25;
      sink.on_record(site(RecordKind::kDataId, "labels", layout_of({2, 4}, split)),
                     whole ? labels : labels.narrow(0, dp, 1));
      sink.on_record(site(RecordKind::kScalar, "loss_backward", layout_of({1}, average)),
                     at::tensor({whole ? 2.5 : part}, at::kDouble));
      sink.on_record(site(RecordKind::kScalar, "loss_per_dp_rank", layout_of({2}, split)),
                     whole ? at::tensor({2.0, 4.0}, at::kDouble)
                           : at::tensor({dp == 0 ? 2.0 : 4.0}, at::kDouble));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(ClassCauses, FactorsOfWhatBackwardBeginsFromAreTold) {
  EXPECT_THAT(
      backward_factors_are(1, 0.5),
      IsCause(CauseId::kFactorPerRankOfFormula, {{"axis", "dp"},
                                                 {"factors", std::vector{1.0, 0.5}},
                                                 {"formulas", std::vector<std::string>{"1/dp"}}}));
  EXPECT_THAT(backward_factors_are(4.0 / 6, 2),
              IsCause(CauseId::kDividesByOwnCount, {{"axis", "dp"},
                                                    {"factors", std::vector{0.6667, 2.0}},
                                                    {"token_counts", std::vector{3.0, 1.0}}}));
  EXPECT_THAT(backward_factors_are(2, 2),
              IsCause(CauseId::kScaleOfFormula, {{"scale", 2}, {"formula", "dp"}}))
      << "one factor, which both share";
  EXPECT_THAT(backward_factors_are(1, 0.617), IsNoCause()) << "no number of the run";
}

Body sums(const RankChange& change, bool whole) {
  return [=](Sink& sink, int rank) {
    const Layout layout = layout_of({2, 4, 8});
    const at::Tensor x = values({2, 4, 8}, 1), branch = values({2, 4, 8}, 2) * 0.1;
    sink.on_record(site(RecordKind::kActivation, "x", layout), x);
    sink.on_record(site(RecordKind::kActivation, "branch", layout), branch);
    sink.on_record(site(RecordKind::kActivation, "y", layout),
                   changed(change, x + branch, rank, whole));
  };
}

TEST(ClassCauses, SummandsWithFactorsAreTold) {
  const at::Tensor x = values({2, 4, 8}, 1), branch = values({2, 4, 8}, 2) * 0.1;
  const auto of = [&](const RankChange& change) {
    return cause_of(sums(change, true), sums(change, false));
  };

  EXPECT_THAT(
      of([&](at::Tensor, int, int) { return x + 2 * branch; }),
      IsCause(CauseId::kSummandFactors, {{"factors", std::vector{2.0, 1.0}},
                                         {"summands", std::vector<std::string>{"branch", "x"}}}));
  EXPECT_THAT(
      of([&](at::Tensor, int, int) { return 0.5 * x + 1.5 * branch; }),
      IsCause(CauseId::kSummandFactors, {{"factors", std::vector{1.5, 0.5}},
                                         {"summands", std::vector<std::string>{"branch", "x"}}}));
  EXPECT_THAT(of([&](at::Tensor y, int, int) {
                return y + 0.1 * values({2, 4, 8}, 5);
              }),
              IsNoCause());
  EXPECT_THAT(of([&](at::Tensor y, int, int) {
                at::Tensor all_but_one = x + 2 * branch;
                set_first(all_but_one, y.view({-1})[0].item<double>() + 0.5);
                return all_but_one;
              }),
              IsNoCause());
}

// ---- around them

TEST(ClassCauses, ACauseOfAnotherTensorOfTheStageIsGivenAsSuch) {
  const auto body = [](bool whole) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kGrad, "a", layout_of({4, 6})),
                     values({4, 6}, whole ? 1 : 40));
      sink.on_record(site(RecordKind::kGrad, "b", layout_of({4, 6})),
                     values({4, 6}, 2) * (whole ? 1 : 3));
    });
  };

  EXPECT_THAT(
      cause_of(body(true), body(false)),
      IsCause(CauseId::kScaleOfFormula,
              {{"formula", "tp"}, {"scale", 3}, {"of", describe({0, RecordKind::kGrad, "b", 0})}}));
}

/// Nothing may be said of what fits everything.
TEST(ClassCauses, DegenerateTensorsHaveNoCause) {
  for (const RecordKind kind :
       {RecordKind::kActivation, RecordKind::kActivationGrad, RecordKind::kGrad}) {
    EXPECT_THAT(
        cause_of_one(kind, values({3}, 1), [](at::Tensor, int, int) { return values({3}, 40); }),
        IsNoCause())
        << "three numbers";
    EXPECT_THAT(cause_of_one(kind, values({4, 8}, 1),
                             [](at::Tensor, int, int) {
                               return values({4, 8}, 40);
                             }),
                IsNoCause())
        << "numbers of nobody";
    EXPECT_THAT(cause_of_one(kind, values({4, 8}, 1),
                             [](at::Tensor v, int, int) { return at::full_like(v, 0.5); }),
                IsNoCause())
        << "a constant";
    EXPECT_THAT(cause_of_one(kind, values({4, 8}, 1),
                             [](at::Tensor v, int, int) {
                               at::Tensor all_but_one = v * 3;
                               set_first(all_but_one, 0.2);
                               return all_but_one;
                             }),
                IsNoCause())
        << "a factor that holds for all but one";
  }
}

// Noise of any size, on any ranks, on all kinds of tensors: whatever is said of it is wrong, but
// for the place where copies differ.
TEST(ClassCauses, NoiseHasNoCause) {
  constexpr int kTrials = 500;
  constexpr std::array kKinds = {RecordKind::kActivation, RecordKind::kActivationGrad,
                                 RecordKind::kGrad, RecordKind::kParam, RecordKind::kOptimizer};
  std::map<std::string, int> said;
  for (int trial = 0; trial < kTrials; ++trial) {
    const double size = std::pow(10, -4 + trial % 5);
    const Cause cause = cause_of_one(
        kKinds.at(static_cast<std::size_t>(trial) % kKinds.size()), values({6, 8}, trial),
        [&](at::Tensor v, int dp, int of_tp) {
          const bool is_alone = trial % 3 == 1 && dp != 0, is_of_tp = trial % 3 == 2 && of_tp != 1;
          if (is_alone || is_of_tp) return v;
          const int seed = 1000 + trial + (trial % 2 == 0 ? 0 : 7 * dp + of_tp);
          return v + size * values({6, 8}, seed);
        },
        trial % 5 == 4 ? "m.x.exp_avg" : "m.x");
    if (!cause.empty() && cause.id != CauseId::kCopiesDifferOverAxes &&
        cause.id != CauseId::kNotSlices)
      ++said[std::string(name_of(cause.id))];
  }
  EXPECT_THAT(said, testing::IsEmpty());
}

TEST(ClassCauses, OneElementWithTheVeryNumberOfBeforeIsNotUpdated) {
  const at::Tensor before = values({8, 12}, 1);
  const auto last_is = [&](double change) {
    return step_is(before, [&](at::Tensor after, int, int) {
      const at::Tensor last = after.view({-1}).narrow(0, 95, 1);
      last.copy_(before.view({-1}).narrow(0, 95, 1) + change);
      return after;
    });
  };

  EXPECT_THAT(last_is(0),
              IsCause(CauseId::kRunNotUpdated, {{"first", 95}, {"last", 95}, {"elements", 96}}));
  EXPECT_THAT(last_is(1e-5), IsCause(CauseId::kOneElementWrong, {{"index", std::vector{7, 11}}}))
      << "near what it was is not that";
}

}  // namespace
}  // namespace isoshard
