// SPDX-License-Identifier: Apache-2.0
/// Each class of causes on made-up runs with dp 2 and tp 3, and beside each a run that looks like
/// it and is not: it must not be given that cause.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "harness/judge/judge.h"
#include "harness/testing/diagnosed_run.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using causes_testing::diagnosis_of;
using causes_testing::kMesh;
using causes_testing::kTp;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

using Change = std::function<at::Tensor(at::Tensor, int dp, int tp)>;

/// What changes nothing on the one process of the reference, and is called on every rank of the
/// run.
at::Tensor changed(const Change& change, const at::Tensor& value, int rank, bool whole) {
  return whole ? value : change(value.clone(), rank / kTp, rank % kTp);
}

/// One tensor that all ranks hold.
std::string diagnosis_of_one(RecordKind kind, const at::Tensor& value, const Change& change,
                             const std::string& name = "m.x") {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      sink.on_record(site(kind, name, layout_of(value.sizes().vec())),
                     changed(change, value, rank, whole));
    });
  };
  return diagnosis_of(body(true), body(false));
}

void set_first(at::Tensor& tensor, double value) {
  tensor.view({-1}).select(0, 0).fill_(value);
}

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

std::string last_pass_is(
    const std::function<at::Tensor(std::vector<at::Tensor>, at::Tensor)>& change) {
  return diagnosis_of(passes(change, true), passes(change, false));
}

TEST(ClassCauses, ValuesOfAnotherStepOrMicroBatchAreTold) {
  EXPECT_THAT(last_pass_is([](auto before, auto) { return before[2]; }),
              HasSubstr("micro-batch 1 has the values of micro-batch 0, which came before: stale"));
  EXPECT_THAT(last_pass_is([](auto before, auto) { return before[1]; }),
              HasSubstr("stale by 1 step"));
  EXPECT_THAT(last_pass_is([](auto before, auto right) {
                at::Tensor all_but_one = before[2].clone();
                all_but_one.view({-1}).select(0, 5).copy_(right.view({-1}).select(0, 5));
                return all_but_one;
              }),
              Not(HasSubstr("micro-batch 0")))
      << "one element is right";
  EXPECT_THAT(last_pass_is([](auto, auto right) { return at::zeros_like(right); }),
              Not(HasSubstr("stale")));
}

TEST(ClassCauses, ConstantsAreNotStale) {
  const auto body = [](double second) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kActivation, "m.x", layout_of({32})), at::ones({32}));
      sink.begin_step(1);
      sink.on_record(site(RecordKind::kActivation, "m.x", layout_of({32})), at::full({32}, second));
    });
  };

  EXPECT_THAT(diagnosis_of(body(2), body(1)), Not(HasSubstr("stale")));
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

  EXPECT_THAT(diagnosis_of(body(4.5), body(3.25)), HasSubstr("stale by 1 step"));
  EXPECT_THAT(diagnosis_of(body(4.5), body(3.26)), Not(HasSubstr("stale")));
  EXPECT_THAT(diagnosis_of(body(3.2501), body(3.25)), Not(HasSubstr("stale")))
      << "too near to the right one";
}

// ---- steps of parameters

/// A parameter before and after a step with its gradient; `change` makes what the run has after it.
Body stepped(const at::Tensor& before, const Change& change, bool whole) {
  return [=](Sink& sink, int rank) {
    const at::Tensor gradient = values(before.sizes().vec(), 7), after = before - 0.01 * gradient;
    const Layout layout = layout_of(before.sizes().vec());
    sink.on_record(site(RecordKind::kParam, "m.w", layout), before);
    sink.on_record(site(RecordKind::kGrad, "m.w", layout), gradient);
    sink.on_record(site(RecordKind::kParam, "m.w", layout), changed(change, after, rank, whole));
  };
}

std::string step_is(const at::Tensor& before, const Change& change, double decay = 0) {
  JudgePolicy policy;
  if (decay != 0) policy.step_rule = StepRule{.learning_rate = 0.01, .weight_decay = decay};
  return diagnosis_of(stepped(before, change, true), stepped(before, change, false), policy);
}

TEST(ClassCauses, APartThatIsNotUpdatedIsNamed) {
  const at::Tensor before = values({8, 12}, 1);

  EXPECT_THAT(step_is(before,
                      [&](at::Tensor after, int, int) {
                        after.narrow(0, 4, 3).copy_(before.narrow(0, 4, 3));
                        return after;
                      }),
              HasSubstr("rows 4..6 not updated (as before the step), the others right"));
  EXPECT_THAT(step_is(before,
                      [&](at::Tensor after, int, int tp) {
                        if (tp == 2) after.narrow(1, 10, 2).copy_(before.narrow(1, 10, 2));
                        return after;
                      }),
              HasSubstr("columns 10..11 not updated (as before the step), the others right on tp "
                        "rank 2"));
  EXPECT_THAT(
      step_is(before, [&](at::Tensor after, int, int tp) { return tp == 1 ? before : after; }),
      HasSubstr("not updated (bitwise as before) on tp rank 1"));
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
              Not(HasSubstr("not updated")));
  EXPECT_THAT(
      step_is(before,
              [&](at::Tensor after, int, int) {
                after.narrow(0, 4, 1).narrow(1, 0, 3).copy_(before.narrow(0, 4, 1).narrow(1, 0, 3));
                return after;
              }),
      Not(HasSubstr("not updated")))
      << "three elements are too few";
}

TEST(ClassCauses, WeightDecayThatIsLeftOutOrDoubledIsTold) {
  const at::Tensor before = values({8, 12}, 1);
  const auto decayed = [&](double times) {  // the reference has it once, within `after`
    return step_is(
        before,
        [&](at::Tensor after, int, int) { return after + (1 - times) * 0.01 * 0.1 * before; }, 0.1);
  };

  EXPECT_THAT(decayed(0), HasSubstr("weight decay (0.01 x 0.1) is left out"));
  EXPECT_THAT(decayed(2), HasSubstr("weight decay (0.01 x 0.1) is applied twice"));
  EXPECT_THAT(step_is(
                  before,
                  [&](at::Tensor after, int, int) {
                    at::Tensor all_but_one = after + 0.01 * 0.1 * before;
                    set_first(all_but_one, after.view({-1})[0].item<double>());
                    return all_but_one;
                  },
                  0.1),
              Not(HasSubstr("decay")));
  EXPECT_THAT(step_is(
                  at::zeros({8, 12}), [](at::Tensor after, int, int) { return after + 1e-3; }, 0.1),
              Not(HasSubstr("decay")))
      << "zeros do not decay";
}

// ---- rounding

TEST(ClassCauses, ValuesRoundedOnTheWayAreTold) {
  const at::Tensor value = values({16, 8}, 1);
  const auto rounded = [](const at::Tensor& t, at::ScalarType to) {
    return t.to(to).to(t.scalar_type());
  };
  const auto of = [&](const Change& change) {
    return diagnosis_of_one(RecordKind::kActivation, value, change);
  };

  EXPECT_THAT(of([&](at::Tensor v, int, int) { return rounded(v, at::kBFloat16); }),
              HasSubstr("rounded to bf16"));
  EXPECT_THAT(of([&](at::Tensor v, int, int tp) { return tp == 1 ? rounded(v, at::kHalf) : v; }),
              AllOf(HasSubstr("rounded to fp16 or TF32"), HasSubstr("on tp rank 1")));
  EXPECT_THAT(of([&](at::Tensor v, int, int) {
                v.narrow(0, 0, 15).copy_(rounded(v.narrow(0, 0, 15), at::kBFloat16));
                return v;
              }),
              Not(HasSubstr("rounded")))
      << "some elements only";
  EXPECT_THAT(of([&](at::Tensor v, int, int) { return rounded(v * 1.02, at::kBFloat16); }),
              Not(HasSubstr("rounded")))
      << "off by more than half a step";
  EXPECT_THAT(diagnosis_of_one(RecordKind::kActivation, rounded(value, at::kBFloat16),
                               [](at::Tensor v, int, int) {
                                 return (v * (1 + 0x1p-8)).to(at::kBFloat16).to(at::kFloat);
                               }),
              Not(HasSubstr("rounded")))
      << "the right ones have few bits, too";
}

TEST(ClassCauses, SummandsRoundedBeforeTheirMeanAreTold) {
  const at::Tensor first = values({32, 8}, 1), second = values({32, 8}, 2),
                   mean = (first + second) / 2;
  const auto bf16 = [](const at::Tensor& t) { return t.to(at::kBFloat16).to(at::kFloat); };

  EXPECT_THAT(
      diagnosis_of_one(RecordKind::kGrad, mean,
                       [&](at::Tensor, int, int) { return (bf16(first) + bf16(second)) / 2; }),
      HasSubstr("summands rounded to bf16 before they are added over dp"));
  EXPECT_THAT(diagnosis_of_one(RecordKind::kGrad, mean,
                               [&](at::Tensor m, int, int) {
                                 return m + 2e-3 * values({32, 8}, 9);
                               }),
              Not(HasSubstr("rounded")))
      << "noise of that size with all its bits";
}

// ---- factors

std::string factors_are(const std::vector<double>& of_tp, bool all_but_one = false) {
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
  return diagnosis_of(body(true), body(false));
}

TEST(ClassCauses, OneFactorForEachRankIsListed) {
  EXPECT_THAT(factors_are({1, 0.75, 0.6}), HasSubstr("one factor for each tp rank: 1, 0.75, 0.6"));
  EXPECT_THAT(factors_are({1, 2, 3}), HasSubstr("one factor for each tp rank: 1, 2, 3 = rank + 1"));
  EXPECT_THAT(factors_are({0.7, 0.75, 0.6}, true), Not(HasSubstr("one factor")))
      << "it does not hold for one element";
  EXPECT_THAT(factors_are({1, 0.75, 0.75}), Not(HasSubstr("one factor")))
      << "one factor, which two ranks share";
}

/// An activation's gradient of two dp ranks whose samples have 3 and 1 targets.
std::string dp_factors_are(double first, double second) {
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
  return diagnosis_of(body(true), body(false));
}

TEST(ClassCauses, FactorsThatAreTokenCountsAreNamed) {
  EXPECT_THAT(dp_factors_are(4.0 / 6, 4.0 / 2),
              AllOf(HasSubstr("one factor for each dp rank: 0.6667, 2"),
                    HasSubstr("which are 3, 1: each rank divides by its own count")));
  EXPECT_THAT(dp_factors_are(0.67, 1.9), Not(HasSubstr("count")));
}

Body sums(const Change& change, bool whole) {
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
  const auto of = [&](const Change& change) {
    return diagnosis_of(sums(change, true), sums(change, false));
  };

  EXPECT_THAT(of([&](at::Tensor, int, int) { return x + 2 * branch; }),
              HasSubstr("summands with wrong factors: 2 x branch + 1 x x, each should have 1"));
  EXPECT_THAT(of([&](at::Tensor, int, int) { return 0.5 * x + 1.5 * branch; }),
              HasSubstr("1.5 x branch + 0.5 x x"));
  EXPECT_THAT(of([&](at::Tensor y, int, int) {
                return y + 0.1 * values({2, 4, 8}, 5);
              }),
              Not(HasSubstr("summands")));
  EXPECT_THAT(of([&](at::Tensor y, int, int) {
                at::Tensor all_but_one = x + 2 * branch;
                set_first(all_but_one, y.view({-1})[0].item<double>() + 0.5);
                return all_but_one;
              }),
              Not(HasSubstr("summands")));
}

// ---- a vocabulary

constexpr std::int64_t kVocabulary = 24, kWidth = 16;

/// Ids of which 1, 3, 5, 7 and 9 come once and 2, 4, 6, 8 twice.
at::Tensor batch_ids() {
  return at::tensor({1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 4, 6, 8, 9 + 1}, at::kLong).reshape({2, 7});
}

/// The gradient of an embedding: each id's row is the sum over its places.
at::Tensor row_sums(const at::Tensor& ids, const at::Tensor& dy) {
  return at::zeros({kVocabulary, kWidth}).index_add(0, ids.flatten(), dy.reshape({-1, kWidth}));
}

std::string rows_are(const Change& change) {
  const at::Tensor ids = batch_ids(), dy = values({2, 7, kWidth}, 3);
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({2, 7})), ids);
      sink.on_record(site(RecordKind::kActivationGrad, "embed", layout_of({2, 7, kWidth})), dy);
      sink.on_record(site(RecordKind::kGrad, "embed.weight", layout_of({kVocabulary, kWidth})),
                     changed(change, row_sums(ids, dy), rank, whole));
    });
  };
  return diagnosis_of(body(true), body(false));
}

TEST(ClassCauses, RowsOfAbsentIdsAreTold) {
  EXPECT_THAT(rows_are([](at::Tensor rows, int, int) {
                rows.narrow(0, 12, 3).fill_(0.25);
                return rows;
              }),
              HasSubstr("rows of ids that are not in input_ids: 3 rows (12, 13, 14) must be 0"));
  EXPECT_THAT(rows_are([](at::Tensor rows, int, int) {
                rows.narrow(0, 12, 3).fill_(0.25);
                rows.narrow(0, 4, 1).mul_(3);
                return rows;
              }),
              Not(HasSubstr("must be 0")))
      << "another row is wrong, too";
}

TEST(ClassCauses, RepeatedIdsThatAreNotSummedAreTold) {
  const at::Tensor ids = batch_ids().flatten(),
                   dy = values({2, 7, kWidth}, 3).reshape({-1, kWidth});

  EXPECT_THAT(rows_are([&](at::Tensor rows, int, int) {
                for (std::int64_t i = 0; i < ids.numel(); ++i)
                  rows.select(0, ids[i].item<std::int64_t>()).copy_(dy[i]);
                return rows;
              }),
              HasSubstr("repeated ids are not summed: rows of 4 repeated ids in input_ids have the "
                        "gradient of the last occurrence alone"));
  EXPECT_THAT(rows_are([&](at::Tensor rows, int, int) {
                for (const std::int64_t id : {2, 4, 6, 8}) rows.select(0, id).div_(2);
                return rows;
              }),
              HasSubstr("rows of the 4 repeated ids in input_ids are divided by how often"));
  EXPECT_THAT(rows_are([&](at::Tensor rows, int, int) {
                for (const std::int64_t id : {2, 4, 6, 8}) rows.select(0, id).mul_(0.7);
                return rows;
              }),
              Not(HasSubstr("repeated ids")));
}

TEST(ClassCauses, RowsOfOtherIdsThatWereReadAreTold) {
  const at::Tensor ids = batch_ids(), weight = values({kVocabulary, kWidth}, 3);
  const auto read = [&](const std::function<at::Tensor(at::Tensor ids)>& from) {
    const auto body = [&](bool whole) {
      return Body([=](Sink& sink, int) {
        sink.on_record(site(RecordKind::kParam, "embed.weight", layout_of({kVocabulary, kWidth})),
                       weight);
        sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({2, 7})), ids);
        sink.on_record(site(RecordKind::kActivation, "embed", layout_of({2, 7, kWidth})),
                       at::embedding(weight, whole ? ids : from(ids)));
      });
    };
    return diagnosis_of(body(true), body(false));
  };

  EXPECT_THAT(read([](const at::Tensor& own) { return own + 2; }),
              HasSubstr("have row id + 2 of embed.weight"));
  EXPECT_THAT(read([](const at::Tensor& own) { return at::where(own > 4, own - 1, own); }),
              HasSubstr("from 5 to 10 have row id - 1 of embed.weight"));
  EXPECT_THAT(read([](const at::Tensor& own) { return 23 - own; }), Not(HasSubstr("have row id")));
}

/// The gradient of 8 rows of logits, 12 columns each; `change` gets right gradient and logits.
std::string logit_gradient_is(
    const std::function<at::Tensor(at::Tensor right, at::Tensor logits)>& change) {
  const at::Tensor labels = at::arange(8, at::kLong).reshape({2, 4}),
                   logits = values({2, 4, 12}, 5);
  const at::Tensor right =
      (at::softmax(logits, -1) - at::one_hot(labels, 12).to(at::kFloat)) * 0.125;
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kDataId, "labels", layout_of({2, 4})), labels);
      sink.on_record(site(RecordKind::kActivation, "head", layout_of({2, 4, 12})), logits);
      sink.on_record(site(RecordKind::kActivationGrad, "head", layout_of({2, 4, 12})),
                     whole ? right : change(right.clone(), logits));
    });
  };
  return diagnosis_of(body(true), body(false));
}

TEST(ClassCauses, RowsOfALogitGradientThatDoNotSumToZeroAreTold) {
  EXPECT_THAT(logit_gradient_is([](const at::Tensor&, const at::Tensor& logits) {
                return at::softmax(logits, -1) * 0.125;
              }),
              HasSubstr("rows of the logits' gradient do not sum to 0 (8 of 8 rows, up to 1 of "
                        "their absolute sum): the target's 1 is not subtracted"));
  EXPECT_THAT(logit_gradient_is(
                  [](const at::Tensor& right, const at::Tensor&) { return right.roll(1, 2); }),
              Not(HasSubstr("sum to 0")))
      << "wrong rows whose sum is 0";
  EXPECT_THAT(logit_gradient_is([](at::Tensor right, const at::Tensor&) {
                right.select(0, 0).select(0, 0).add_(0.1);
                return right;
              }),
              Not(HasSubstr("sum to 0")))
      << "one row of eight";
}

// ---- places

TEST(ClassCauses, WhatAnotherRankShouldHoldIsTold) {
  const auto held = [](const std::function<at::Tensor(at::Tensor whole, int tp)>& part) {
    const at::Tensor value = values({6, 8}, 1);
    const auto body = [=](bool whole) {
      return Body([=](Sink& sink, int rank) {
        const std::vector<Placement> split =
            whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kTp, 0)};
        sink.on_record(site(RecordKind::kGrad, "m.w", layout_of({6, 8}, split)),
                       whole ? value : part(value, rank % kTp));
      });
    };
    return diagnosis_of(body(true), body(false));
  };

  EXPECT_THAT(held([](const at::Tensor& v, int tp) {
                return v.narrow(0, 2 * ((tp + 1) % kTp), 2).clone();
              }),
              HasSubstr("ranks 0, 1, 2, 3, 4, 5 hold what ranks 1, 2, 0, 1, 2, 0 should hold"));
  EXPECT_THAT(held([](const at::Tensor& v, int tp) {
                at::Tensor own = v.narrow(0, 2 * ((tp + 1) % kTp), 2).clone();
                set_first(own, 3);
                return own;
              }),
              Not(HasSubstr("should hold")));
}

TEST(ClassCauses, APermutationIsNamed) {
  EXPECT_THAT(diagnosis_of_one(RecordKind::kActivation, values({4, 3, 8}, 1),
                               [](at::Tensor v, int, int) { return v.flip(0).contiguous(); }),
              HasSubstr("permuted along dim 0 on rank 0 (samples: 0 has 3, 1 has 2, 2 has 1"));
  EXPECT_THAT(diagnosis_of_one(RecordKind::kActivation, values({2, 3, 12}, 1),
                               [](at::Tensor v, int, int) {
                                 return v.reshape({2, 3, 3, 4}).flip(2).reshape({2, 3, 12});
                               }),
              HasSubstr("(features, in blocks of 4: 0 has 2, 2 has 0)"));
}

// ---- norms, data ids, flags

/// Gradients of four parameters and the norm whose square is `squares` of theirs.
std::string norm_is(const std::function<double(std::vector<double> squares)>& squares) {
  const std::vector<std::string> names = {"embed.weight", "layers.0.norm.weight",
                                          "layers.1.norm.weight", "head.weight"};
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int) {
      std::vector<double> own;
      for (std::size_t i = 0; i < names.size(); ++i) {
        const at::Tensor gradient = values({20}, static_cast<std::int64_t>(i + 1));
        own.push_back(gradient.to(at::kDouble).square().sum().item<double>());
        sink.on_record(site(RecordKind::kGrad, names[i], layout_of({20})), gradient);
      }
      const double all = own[0] + own[1] + own[2] + own[3];
      sink.on_record(site(RecordKind::kScalar, "grad_norm", layout_of({1})),
                     at::tensor({std::sqrt(whole ? all : squares(own))}, at::kDouble));
    });
  };
  return diagnosis_of(body(true), body(false));
}

TEST(ClassCauses, SquaresThatANormLacksOrHasTwiceAreNamed) {
  EXPECT_THAT(norm_is([](auto s) { return s[1] + s[2] + s[3]; }),
              HasSubstr("too small; the squares of embed.weight are left out"));
  EXPECT_THAT(norm_is([](auto s) { return s[0] + s[3]; }),
              HasSubstr("too small; the squares of all norm.weight (2 parameters) are left out"));
  EXPECT_THAT(norm_is([](auto s) { return s[0] + s[1] + s[2] + 2 * s[3]; }),
              HasSubstr("too large; the squares of head.weight are counted twice"));
  EXPECT_THAT(norm_is([](auto s) { return s[0] + s[1] + s[2] + 1.01 * s[3]; }),
              Not(HasSubstr("squares")));
}

std::string ids_are(const std::vector<std::int64_t>& first, const std::vector<std::int64_t>& second,
                    const std::vector<std::int64_t>& right = {4, 5, 6, 7}) {
  const auto body = [](std::vector<std::int64_t> a, std::vector<std::int64_t> b) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kDataId, "sample_ids", layout_of({4})), at::tensor(a));
      sink.begin_step(1);
      sink.on_record(site(RecordKind::kDataId, "sample_ids", layout_of({4})), at::tensor(b));
    });
  };
  return diagnosis_of(body({0, 1, 2, 3}, right), body(first, second));
}

TEST(ClassCauses, RepeatsAndGapsOfSampleIdsAreListed) {
  EXPECT_THAT(ids_are({0, 1, 2, 3}, {0, 1, 2, 3}), HasSubstr("the ids of step 0 again"));
  EXPECT_THAT(ids_are({1, 2, 3, 4}, {5, 6, 7, 8}), HasSubstr("each id is 1 more"));
  EXPECT_THAT(ids_are({0, 1, 2, 3}, {3, 4, 5, 6}), HasSubstr("each id is 1 less"));
  EXPECT_THAT(ids_are({0, 1, 2, 3}, {4, 5, 5, 6}),
              HasSubstr("ids in steps 0..1 seen more often than they should be: 5; never seen: 7"));
  EXPECT_THAT(ids_are({0, 1, 2, 3}, {5, 4, 7, 6}), HasSubstr("the same ids in another order"));
  EXPECT_THAT(ids_are({0, 1, 1, 2}, {4, 5, 6, 7}), Not(HasSubstr("mean of the")))
      << "ids are not averaged";
}

TEST(ClassCauses, AFlagIsNeitherSummedNorScaled) {
  const auto flag = [](const std::function<double(int rank)>& value, bool whole) {
    return Body([=](Sink& sink, int rank) {
      sink.on_record(site(RecordKind::kScalar, "found_inf", layout_of({1})),
                     at::tensor({whole ? 1.0 : value(rank)}, at::kDouble));
    });
  };
  const auto of = [&](const std::function<double(int rank)>& value) {
    return diagnosis_of(flag(value, true), flag(value, false));
  };

  EXPECT_THAT(of([](int rank) { return rank / kTp == 0 ? 1.0 : 0.0; }),
              AllOf(HasSubstr("a flag: differs over dp, not reduced"), Not(HasSubstr("sum")),
                    Not(HasSubstr("scale"))));
  EXPECT_THAT(of([](int) { return 0.0; }),
              HasSubstr("a flag: 0 on every rank, 1 in the reference"));
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

  EXPECT_THAT(diagnosis_of(body(true), body(false)),
              HasSubstr("of another tensor of this stage, gradient of b: scale 3 = tp"));
}

/// Nothing may be said of what fits everything.
TEST(ClassCauses, DegenerateTensorsHaveNoCause) {
  for (const RecordKind kind :
       {RecordKind::kActivation, RecordKind::kActivationGrad, RecordKind::kGrad}) {
    EXPECT_THAT(diagnosis_of_one(kind, values({3}, 1),
                                 [](at::Tensor, int, int) { return values({3}, 40); }),
                IsEmpty())
        << "three numbers";
    EXPECT_THAT(diagnosis_of_one(kind, values({4, 8}, 1),
                                 [](at::Tensor v, int, int) { return at::zeros_like(v); }),
                IsEmpty())
        << "zeros";
    EXPECT_THAT(diagnosis_of_one(kind, values({4, 8}, 1),
                                 [](at::Tensor v, int, int) { return at::full_like(v, 0.5); }),
                IsEmpty())
        << "a constant";
    EXPECT_THAT(diagnosis_of_one(kind, values({4, 8}, 1),
                                 [](at::Tensor v, int, int) {
                                   at::Tensor all_but_one = v * 3;
                                   set_first(all_but_one, 0.2);
                                   return all_but_one;
                                 }),
                IsEmpty())
        << "a factor that holds for all but one";
  }
}

}  // namespace
}  // namespace isoshard
