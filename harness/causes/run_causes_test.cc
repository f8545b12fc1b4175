// SPDX-License-Identifier: Apache-2.0
/// Each cause that shows beside other records of a run, on made-up runs with dp 2 and tp 3; and
/// beside each, a run that is wrong in another way and must not be given that cause.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "harness/judge/judge.h"
#include "harness/testing/diagnosed_run.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"
#include "harness/verdict/verdict.h"

namespace isoshard {
namespace {

using namespace synthetic;
using causes_testing::cause_of;
using causes_testing::kMesh;
using causes_testing::kTp;
using testing::AllOf;

Body scalars(std::vector<std::pair<std::string, double>> values) {
  return [=](Sink& sink, int) {
    for (const auto& [name, value] : values)
      sink.on_record(site(RecordKind::kScalar, name, layout_of({1})),
                     at::tensor({value}, at::kDouble));
  };
}

at::Tensor ids(std::vector<std::int64_t> values) {
  return at::tensor(values, at::kLong);
}

/// Each dp rank records its half of the global ids.
Body data(const std::string& name, const at::Tensor& global) {
  return [=](Sink& sink, int rank) {
    const std::int64_t half = global.size(0) / 2;
    sink.on_record(
        site(RecordKind::kDataId, name, layout_of(global.sizes().vec(), {shard(Axis::kDp, 0)})),
        global.narrow(0, rank / kTp * half, half));
  };
}
Body whole_data(const std::string& name, const at::Tensor& global) {
  return [=](Sink& sink, int) {
    sink.on_record(site(RecordKind::kDataId, name, layout_of(global.sizes().vec())), global);
  };
}

TEST(RunCauses, RepeatedSamplesAreCounted) {
  const Body right = whole_data("sample_ids", ids({4, 5, 6, 7}));

  EXPECT_THAT(cause_of(right, data("sample_ids", ids({4, 5, 4, 5}))),
              IsCause(CauseId::kIdsRepeated,
                      {{"times", 2}, {"missed", 2}, {"formula", "dp"}, {"num_ids", 4}}));
  EXPECT_THAT(cause_of(right, data("sample_ids", ids({5, 4, 7, 6}))),
              IsCause(CauseId::kIdsInOtherOrder));
  EXPECT_THAT(cause_of(right, data("sample_ids", ids({4, 4, 4, 5}))),
              IsCause(CauseId::kIdsMiscounted, {{"missed", std::vector{6, 7}}}))
      << "not each as often";
  EXPECT_THAT(cause_of(right, data("sample_ids", ids({9, 8, 9, 8}))),
              IsCause(CauseId::kIdsMiscounted, {{"missed", std::vector{4, 5, 6, 7}}}))
      << "ids of another data set";
}

TEST(RunCauses, FewerValidTokensAreCountedAndPlaced) {
  const at::Tensor labels = ids({-100, -100, 3, 4, 5, -100, 7, 8, 9, 6}).reshape({2, 5});
  const auto hidden_at = [&](std::int64_t first, std::int64_t second) {
    at::Tensor changed = labels.clone();
    changed.index_put_({at::arange(2), ids({first, second})}, at::full({2}, -100, at::kLong));
    return data("labels", changed);
  };
  const Body right = whole_data("labels", labels);

  EXPECT_THAT(
      cause_of(right, hidden_at(2, 1)),
      IsCause(CauseId::kFewerValidTokens, {{"num_tokens", 2}, {"place", "first"}, {"each", 1}}));
  EXPECT_THAT(
      cause_of(right, hidden_at(4, 4)),
      IsCause(CauseId::kFewerValidTokens, {{"num_tokens", 2}, {"place", "last"}, {"each", 1}}));
  EXPECT_THAT(cause_of(right, hidden_at(3, 1)),
              AllOf(IsCause(CauseId::kFewerValidTokens, {{"num_tokens", 2}, {"each", 1}}),
                    HasNoValue("place")));
  EXPECT_THAT(cause_of(right, data("labels", labels.roll(1, 1))),
              IsCause(CauseId::kValidTokensElsewhere));
}

/// A loss of two dp ranks with 3 and 1 counted targets and means 2 and 6: the token mean is 3, the
/// mean of means 4.
Body rank_means(double loss, bool whole) {
  return [=](Sink& sink, int rank) {
    const at::Tensor labels = ids({1, 2, 3, 4, 1, 2, -100, -100}).reshape({2, 4}),
                     means = at::tensor({2.0, 6.0}, at::kDouble);
    const auto dp = rank / kTp;
    const std::vector<Placement> split =
        whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
    sink.on_record(site(RecordKind::kDataId, "labels", layout_of({2, 4}, split)),
                   whole ? labels : labels.narrow(0, dp, 1));
    sink.on_record(site(RecordKind::kScalar, "loss_per_dp_rank", layout_of({2}, split)),
                   whole ? means : means.narrow(0, dp, 1));
    scalars({{"loss", loss}})(sink, rank);
  };
}

TEST(RunCauses, AMeanOfRankMeansIsTold) {
  EXPECT_THAT(
      cause_of(rank_means(3, true), rank_means(4, false)),
      IsCause(CauseId::kMeanOfRankMeans, {{"means", 2}, {"token_counts", std::vector{3.0, 1.0}}}));
  EXPECT_THAT(cause_of(rank_means(3, true), rank_means(3.5, false)), IsOnlyOff());
}

// With equally many tokens the mean of means is the right mean, whatever made the means wrong.
TEST(RunCauses, AMeanOfMeansThatIsTheTokenMeanIsNoCause) {
  const auto means_of = [](double first, double second, bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor means = at::tensor({first, second}, at::kDouble);
      const std::vector<Placement> split =
          whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
      sink.on_record(site(RecordKind::kScalar, "loss_per_dp_rank", layout_of({2}, split)),
                     whole ? means : means.narrow(0, rank / kTp, 1));
      scalars({{"loss", (first + second) / 2}})(sink, rank);
    });
  };
  const Reference r = reference(means_of(2, 6, true));
  JudgePolicy options;
  options.rtol = 1e-6;

  const Verdict verdict = judge(r, run(kMesh, &r, means_of(2.5, 6.25, false)), options);

  ASSERT_EQ(verdict.findings.size(), 2U);
  for (const Finding& finding : verdict.findings)
    EXPECT_THAT(finding.cause, IsOnlyOff()) << finding.what;
}

/// Losses of two dp ranks, 2 samples of 3 tokens each, over logits of 5 columns that tp 3 pads to
/// 6; `added` is what they are too large by.
Body padded_losses(const std::function<double(const at::Tensor& lse)>& added, bool whole) {
  return [=](Sink& sink, int rank) {
    const int dp = whole ? 0 : rank / kTp, tp = whole ? 0 : rank % kTp;
    const at::Tensor logits = values({4, 3, 5}, 3) * 2,
                     lse = logits.slice(1, 0, -1).to(at::kDouble).logsumexp(2);
    Layout layout = layout_of({4, 3, 5}), split = layout_of({4, 3});
    at::Tensor own = logits;
    if (!whole) {
      layout.explicit_parts = true;
      layout.boxes = {Box{{0, 0, 0}, {2 * dp, 0, 2 * tp}, {2, 3, tp == 2 ? 1 : 2}}};
      own = at::constant_pad_nd(logits, {0, 1})
                .narrow(0, 2 * dp, 2)
                .narrow(2, 2 * tp, 2)
                .contiguous();
      split.placements = {shard(Axis::kDp, 0)};
    }
    const at::Tensor labels = at::ones({4, 3}, at::kLong);
    sink.on_record(site(RecordKind::kDataId, "labels", split),
                   whole ? labels : labels.narrow(0, 2 * dp, 2));
    (void)sink.on_activation(site(RecordKind::kActivation, "head", layout), own);
    scalars({{"loss", 3 + (whole ? 0 : added(lse))}})(sink, rank);
  };
}

TEST(RunCauses, PaddingInASoftmaxIsTold) {
  const auto wrong = [](const std::function<double(const at::Tensor&)>& added) {
    return cause_of(padded_losses(added, true), padded_losses(added, false));
  };

  EXPECT_THAT(
      wrong([](const at::Tensor& lse) { return lse.neg().exp().log1p().mean().item<double>(); }),
      IsCause(CauseId::kPaddingInSoftmax,
              {{"columns", 1}, {"head", "head"}, {"padded", 6}, {"width", 5}}));
  EXPECT_THAT(wrong([](const at::Tensor& lse) {
                return 1.5 * lse.neg().exp().log1p().mean().item<double>();
              }),
              IsOnlyOff());
}

TEST(RunCauses, AScalarsFactorIsToldIfItIsANumberOfTheRun) {
  EXPECT_THAT(cause_of(scalars({{"x", 5}}), scalars({{"x", 15}})),
              IsCause(CauseId::kScaleOfFormula, {{"scale", 3}, {"formula", "tp"}}));
  EXPECT_THAT(cause_of(scalars({{"x", 5}}), scalars({{"x", 5.0 / 65536}})),
              IsCause(CauseId::kScaleOfFormula, {{"scale", 1.526e-05}, {"formula", "2^-16"}}));
  EXPECT_THAT(cause_of(scalars({{"loss", 5}}), scalars({{"loss", 5 + std::log(3.0)}})),
              IsCause(CauseId::kOffsetOfDegree, {{"offset", 1.0986}, {"axis", "tp"}}));
  EXPECT_THAT(cause_of(scalars({{"x", 5}}), scalars({{"x", 6.1}})), IsOnlyOff());
}

/// A split weight whose squares are 2, 3, 4 on the tp ranks, a replicated one with 9: the norm is
/// sqrt(18).
Body norms(std::function<double(int tp)> norm, bool whole) {
  return [=](Sink& sink, int rank) {
    const int tp = rank % kTp;
    const at::Tensor split = at::tensor({2.0, 3.0, 4.0}, at::kDouble).sqrt(),
                     replicated = at::tensor({3.0}, at::kDouble);
    const std::vector<Placement> over_tp =
        whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kTp, 0)};
    sink.on_record(site(RecordKind::kGrad, "a", layout_of({3}, over_tp)),
                   whole ? split : split.narrow(0, tp, 1));
    sink.on_record(site(RecordKind::kGrad, "b", layout_of({1})), replicated);
    scalars({{"grad_norm", norm(tp)}})(sink, rank);
  };
}

TEST(RunCauses, ANormThatCountsSquaresTooOftenOrNotAtAllIsTold) {
  const Body right = norms([](int) { return std::sqrt(18.0); }, true);
  const auto wrong = [&](std::function<double(int)> norm) {
    return cause_of(right, norms(std::move(norm), false));
  };

  EXPECT_THAT(wrong([](int) { return std::sqrt(9 + 3 * 9.0); }),
              IsCause(CauseId::kReplicatedCountedOften, {{"degree", 3}, {"axis", "tp"}}));
  EXPECT_THAT(wrong([](int) { return std::sqrt(2 + 9.0); }),
              IsCause(CauseId::kNormOfOneRank, {{"axis", "tp"}, {"coordinate", 0}}));
  EXPECT_THAT(wrong([](int) { return std::sqrt(9.0); }), IsCause(CauseId::kReplicatedLeftOut));
  EXPECT_THAT(wrong([](int tp) { return std::sqrt(tp == 0 ? 8.0 : 5.0); }),
              IsCause(CauseId::kSquaresNotSummed, {{"axis", "tp"}, {"axes", std::vector{"tp"}}}));
  EXPECT_THAT(wrong([](int) { return 4.7; }), IsOnlyOff());
}

// In 16 bits the run's gradients, and so the squares of its norm, are not so near the reference's.
TEST(RunCauses, SquaresAddUpToThoseOfTheRunsOwnGradients) {
  const Reference right =
      reference(norms([](int) { return 1.003 * std::sqrt(18.0); }, /*whole=*/true));
  const auto wrong = [&](std::function<double(int)> norm) {
    JudgePolicy policy;
    policy.rtol = 1e-3;
    const Verdict verdict = judge(right, run(kMesh, &right, norms(std::move(norm), false)), policy);
    return verdict.findings.at(0).cause;
  };

  EXPECT_THAT(wrong([](int tp) { return std::sqrt(tp == 0 ? 8.0 : 5.0); }),
              IsCause(CauseId::kSquaresNotSummed, {{"axis", "tp"}, {"axes", std::vector{"tp"}}}));
  EXPECT_THAT(wrong([](int tp) { return std::sqrt(tp == 0 ? 8.0 : 5.05); }), IsOnlyOff());
}

// The same where gradients are cut over dp as runs, besides: of a tensor of 6 split over tp, and of
// one of 4 that tp ranks hold alike.
TEST(RunCauses, SquaresAreToldApartWhereRanksHoldRuns) {
  const at::Tensor split = values({6}, 1), alike = values({4}, 2);
  const auto sum = [](const at::Tensor& t) {
    return t.to(at::kDouble).square().sum().item<double>();
  };
  const auto body = [&](double norm, bool whole) {
    return Body([=](Sink& sink, int rank) {
      const int dp = rank / kTp, tp = rank % kTp;
      const auto piece = [&](const char* name, const at::Tensor& t, std::int64_t begin,
                             std::int64_t count) {
        Layout layout = layout_of(t.sizes().vec());
        layout.explicit_parts = !whole;
        if (!whole) layout.flat = {FlatRange{0, begin, count}};
        sink.on_record(site(RecordKind::kGrad, name, layout),
                       whole ? t : t.narrow(0, begin, count));
      };
      piece("a", split, 2 * tp + dp, 1);
      piece("b", alike, 3 * dp, dp == 0 ? 3 : 1);
      scalars({{"grad_norm", norm}})(sink, rank);
    });
  };
  const auto wrong = [&](double squares) {
    return cause_of(body(std::sqrt(sum(split) + sum(alike)), true),
                    body(std::sqrt(squares), false));
  };

  EXPECT_THAT(wrong(sum(split) + 3 * sum(alike)),
              IsCause(CauseId::kReplicatedCountedOften, {{"degree", 3}, {"axis", "tp"}}));
  EXPECT_THAT(wrong(sum(split.narrow(0, 2, 2)) + sum(alike)),
              IsCause(CauseId::kNormOfOneRank, {{"axis", "tp"}, {"coordinate", 1}}));
  EXPECT_THAT(wrong(sum(split) + 1.4 * sum(alike)), IsOnlyOff());
}

/// A parameter before and after a step of `factor` times the right one, on every rank or on tp rank
/// 1 only.
Body update(double factor, bool on_tp_rank_1_only = false) {
  return [=](Sink& sink, int rank) {
    const double own = on_tp_rank_1_only && rank % kTp != 1 ? 1 : factor;
    scalars({{"grad_norm", 8}})(sink, rank);
    sink.on_record(site(RecordKind::kParam, "w", layout_of({4, 6})), values({4, 6}, 1));
    sink.on_record(site(RecordKind::kParam, "w", layout_of({4, 6})),
                   values({4, 6}, 1) + own * 0.01 * values({4, 6}, 2));
  };
}

TEST(RunCauses, AStepOfAnotherSizeIsToldWithItsFactor) {
  JudgePolicy clipping;
  clipping.max_grad_norm = 4.4;

  EXPECT_THAT(cause_of(update(1), update(8 / 4.4), clipping),
              IsCause(CauseId::kClippingNotApplied, {{"scale", 1.8182}, {"is_update", true}}));
  clipping.max_grad_norm = 13.6;
  EXPECT_THAT(cause_of(update(1), update(13.6 / 8), clipping),
              IsCause(CauseId::kScaledUpToLimit, {{"scale", 1.7}, {"is_update", true}}));
  EXPECT_THAT(cause_of(update(1), update(1.71), clipping),
              IsCause(CauseId::kScale, {{"scale", 1.71}, {"is_update", true}}));
  clipping.max_grad_norm = 4.4;
  EXPECT_THAT(cause_of(update(1), update(8 / 4.4)),
              IsCause(CauseId::kScale, {{"scale", 1.8182}, {"is_update", true}}))
      << "clipping is not known of";
  EXPECT_THAT(cause_of(update(1), update(8 / 4.4)),
              IsCause(CauseId::kScale, {{"scale", 1.8182}, {"is_update", true}}));
  EXPECT_THAT(cause_of(update(1), update(8 / 4.4, true), clipping),
              IsCause(CauseId::kClippingNotApplied, {{"scale", 1.8182},
                                                     {"ranks", std::vector{1, 4}},
                                                     {"axes", std::vector{"tp"}},
                                                     {"is_update", true}}));
  EXPECT_THAT(
      cause_of(update(1), update(3)),
      IsCause(CauseId::kScaleOfFormula, {{"formula", "tp"}, {"scale", 3}, {"is_update", true}}));
}

TEST(RunCauses, AStepInAnotherDirectionHasNoFactor) {
  const Body other = [](Sink& sink, int rank) {
    scalars({{"grad_norm", 8}})(sink, rank);
    sink.on_record(site(RecordKind::kParam, "w", layout_of({4, 6})), values({4, 6}, 1));
    sink.on_record(site(RecordKind::kParam, "w", layout_of({4, 6})),
                   values({4, 6}, 1) + 0.01 * values({4, 6}, 3));
  };

  EXPECT_THAT(cause_of(update(1), other), IsNoCause());
}

// ---- samples and steps of a training loop

/// Tokens of 4 samples, of two dp ranks each its half.
Cause inputs_are(const at::Tensor& right, const at::Tensor& wrong) {
  return cause_of(whole_data("input_ids", right), data("input_ids", wrong));
}

TEST(RunCauses, SamplesThatTheBatchHasNotAreTold) {
  const auto tokens = [](std::int64_t seed) { return (values({4, 16}, seed) * 500).to(at::kLong); };
  const at::Tensor right = tokens(1);
  const auto second_half = [&](const at::Tensor& other) {
    return at::cat({right.narrow(0, 0, 2), other.narrow(0, 2, 2)});
  };

  EXPECT_THAT(inputs_are(right, second_half(tokens(7))),
              IsCause(CauseId::kSamplesForeign,
                      {{"foreign", 2}, {"samples", 2}, {"ranks", std::vector{3, 4, 5}}}));
  EXPECT_THAT(inputs_are(right, second_half(right.roll(1, 1))),
              testing::Not(IsCause(CauseId::kSamplesForeign)))
      << "tokens of the batch, one place further on";
  at::Tensor changed = right.clone();
  changed.narrow(1, 0, 10).fill_(3);
  EXPECT_THAT(inputs_are(right, changed), testing::Not(IsCause(CauseId::kSamplesForeign)))
      << "samples of the batch, most of whose tokens are masked";
  EXPECT_THAT(inputs_are(right, right.flip(0)),
              IsCause(CauseId::kIdsInOtherOrder, {{"items", "samples"}}));
  EXPECT_THAT(inputs_are(right, at::cat({right.narrow(0, 0, 2), right.narrow(0, 0, 2)})),
              IsCause(CauseId::kIdsRepeated, {{"items", "samples"}, {"times", 2}, {"missed", 2}}));
}

// Inputs of floating point are recorded as their bits: negative ones are no masked labels.
TEST(RunCauses, InputsOfFloatingPointHaveNoValidTokens) {
  const at::Tensor right = values({4, 16}, 1), other = values({4, 16}, 7);
  const auto bits_are = [&](const at::Tensor& wrong) {
    return inputs_are(right.view(at::kInt), wrong.contiguous().view(at::kInt));
  };

  EXPECT_THAT(bits_are(right.flip(0)), IsCause(CauseId::kIdsInOtherOrder, {{"items", "samples"}}));
  EXPECT_THAT(bits_are(at::cat({right.narrow(0, 0, 2), other.narrow(0, 2, 2)})),
              IsCause(CauseId::kSamplesForeign, {{"foreign", 2}, {"samples", 2}}));
  EXPECT_THAT(bits_are(right * 1.01), IsNoCause()) << "the batch's samples, scaled";
  EXPECT_THAT(bits_are(right + 0.01 * other), IsNoCause()) << "and with noise";
}

// Of 8 tokens 2 are those of some other sample by chance, at some distance.
TEST(RunCauses, FewTokensThatAreAlikeDoNotMakeASampleOfTheBatch) {
  const auto tokens = [](std::int64_t seed) { return (values({4, 8}, seed) * 16).to(at::kLong); };
  const at::Tensor right = tokens(1), other = tokens(7);

  EXPECT_THAT(inputs_are(right, at::cat({right.narrow(0, 0, 2), other.narrow(0, 2, 2)})),
              IsCause(CauseId::kSamplesForeign, {{"foreign", 2}, {"samples", 2}}));
  at::Tensor masked = right.clone();
  masked.narrow(1, 0, 4).fill_(99);
  EXPECT_THAT(inputs_are(right, masked), testing::Not(IsCause(CauseId::kSamplesForeign)));
  EXPECT_THAT(inputs_are(right, right + 1), testing::Not(IsCause(CauseId::kSamplesForeign)));
}

// Padding is alike in all samples.
TEST(RunCauses, PaddedSamplesThatTheBatchHasNotAreTold) {
  const auto tokens = [](std::int64_t seed) {
    at::Tensor padded = (values({4, 16}, seed).abs() * 500).to(at::kLong) + 1;
    padded.narrow(1, 8, 8).fill_(0);
    return padded;
  };
  const at::Tensor right = tokens(1);

  EXPECT_THAT(inputs_are(right, at::cat({right.narrow(0, 0, 2), tokens(7).narrow(0, 2, 2)})),
              IsCause(CauseId::kSamplesForeign, {{"foreign", 2}, {"samples", 2}}));
}

TEST(RunCauses, SamplesOfAnotherStepAreTold) {
  const auto tokens = [](std::int64_t seed) { return (values({4, 16}, seed) * 500).to(at::kLong); };
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const int dp = rank / kTp;
      const std::vector<Placement> split =
          whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
      for (int step = 0; step < 2; ++step) {
        if (step > 0) sink.begin_step(step);
        const at::Tensor own = tokens(!whole && dp == 1 ? 2 - step : 1 + step);
        sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({4, 16}, split)),
                       whole ? own : own.narrow(0, 2 * dp, 2));
      }
    });
  };

  EXPECT_THAT(cause_of(body(true), body(false)),
              IsCause(CauseId::kSamplesForeign, {{"foreign", 2}, {"samples", 2}, {"step", 1}}));
}

/// Two steps with inputs, an activation and a rate; the run has the first `forward` of them, and
/// the rate of the step before in a step without.
Body steps_with_forward(int forward, bool with_inputs) {
  return [=](Sink& sink, int) {
    for (int step = 0; step < 2; ++step) {
      if (step > 0) sink.begin_step(step);
      sink.on_record(site(RecordKind::kScalar, "learning_rate", layout_of({1})),
                     at::tensor({0.1 * (1 + std::min(step, forward - 1))}, at::kDouble));
      if (step >= forward) continue;
      if (with_inputs)
        sink.on_record(site(RecordKind::kDataId, "input_ids", layout_of({4})), ids({1, 2, 3, 4}));
      sink.on_record(site(RecordKind::kActivation, "m", layout_of({4})), values({4}, 1 + step));
    }
  };
}

TEST(RunCauses, AStepWithoutAForwardPassIsTold) {
  EXPECT_THAT(cause_of(steps_with_forward(2, true), steps_with_forward(1, true)),
              IsCause(CauseId::kStepWithoutForward, {{"step", 1}, {"before", 0}}));
  EXPECT_THAT(cause_of(steps_with_forward(2, false), steps_with_forward(1, false)),
              IsCause(CauseId::kStepWithoutForward, {{"step", 1}, {"before", 0}}))
      << "a run that records no inputs at all";
  EXPECT_THAT(cause_of(steps_with_forward(2, true), steps_with_forward(2, false)), IsNoCause())
      << "inputs are not recorded, and activations are";
}

/// One pass of a linear module "m" with input "x": 8 samples of 3 tokens, of which each dp rank has
/// 4. Sample `i` of a rank counts `weights[dp][i]` times, in the gradient at the module's output if
/// `from_loss`, or in the parameter's alone. The first `counted[sample]` tokens have a gradient.
struct WeightedSamples {
  std::vector<std::vector<double>> weights;
  bool from_loss = false;
  std::vector<std::int64_t> counted = std::vector<std::int64_t>(8, 3);
};

Body weighted(const WeightedSamples& samples, bool whole) {
  return [=](Sink& sink, int rank) {
    const int own = whole ? 0 : rank / kTp;
    const std::vector<Placement> split =
        whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
    const auto mine = [&](const at::Tensor& t) { return whole ? t : t.narrow(0, 4 * own, 4); };
    const at::Tensor x = values({8, 3, 5}, 10), y = values({8, 3, 7}, 30);
    at::Tensor dy = values({8, 3, 7}, 20), weights = at::ones({8, 1, 1});
    for (std::int64_t i = 0; i < 8; ++i) {
      const std::int64_t counted = samples.counted[static_cast<std::size_t>(i)];
      dy.select(0, i).narrow(0, counted, 3 - counted).zero_();
      if (!whole)
        weights.select(0, i).fill_(
            samples.weights[static_cast<std::size_t>(i / 4)][static_cast<std::size_t>(i % 4)]);
    }
    const at::Tensor gradient =
        (weights * dy).reshape({24, 7}).t().mm(x.reshape({24, 5})).contiguous();
    sink.on_record(site(RecordKind::kActivation, "x", layout_of({8, 3, 5}, split)), mine(x));
    sink.on_record(site(RecordKind::kActivation, "m", layout_of({8, 3, 7}, split)), mine(y));
    if (samples.from_loss)
      sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                     at::tensor({1.7 * weights.mean().item<double>()}, at::kDouble));
    sink.on_record(site(RecordKind::kActivationGrad, "m", layout_of({8, 3, 7}, split)),
                   mine(samples.from_loss ? weights * dy : dy).contiguous());
    sink.on_record(site(RecordKind::kGrad, "m.weight", layout_of({7, 5})), gradient);
  };
}

Cause weights_are(const WeightedSamples& samples) {
  return cause_of(weighted(samples, true), weighted(samples, false));
}
Cause weights_are(const std::vector<double>& on_each_rank, bool from_loss) {
  return weights_are({.weights = {on_each_rank, on_each_rank}, .from_loss = from_loss});
}

// A script's micro-batches may be recorded as one pass.
TEST(RunCauses, MicroBatchesOfAPassAreTold) {
  for (const bool from_loss : {false, true}) {
    EXPECT_THAT(weights_are({0, 0, 1, 1}, from_loss),
                IsCause(CauseId::kMicroBatchMissing,
                        {{"present", std::vector{1}}, {"missing", std::vector{0}}, {"last", 1}}))
        << "cleared inside of the loop";
    EXPECT_THAT(weights_are({1, 1, 1, 4}, from_loss),
                IsCause(CauseId::kMicroBatchWeights,
                        {{"weights", std::vector{0.25, 0.25, 0.25, 1.0}}, {"micro_batches", 4}}))
        << "the last one is not divided by their number";
    EXPECT_THAT(weights_are({0.5, 0.5, 2, 2}, from_loss),
                IsCause(CauseId::kMicroBatchWeights,
                        {{"weights", std::vector{0.25, 1.0}}, {"micro_batches", 2}}))
        << "numbers of the run";
    EXPECT_THAT(weights_are({1, 0.61, 1.73, 1}, from_loss), from_loss ? IsOnlyOff() : IsNoCause())
        << "any weights fit something";
  }
  EXPECT_THAT(weights_are({2, 2, 2, 2}, false),
              IsCause(CauseId::kScaleOfFormula, {{"scale", 2}, {"formula", "dp"}}))
      << "one weight for all";
  EXPECT_THAT(weights_are({.weights = {{0, 0, 1, 1}, {1, 1, 0, 0}}}), IsNoCause())
      << "not the same on both ranks";
}

TEST(RunCauses, AMeanOfMeansOfMicroBatchesIsTold) {
  // 3 + 2, 1 + 3, 2 + 2 and 3 + 3 tokens: 19 in all, of which a micro-batch has a quarter
  const std::vector<std::int64_t> counted = {3, 2, 1, 3, 2, 2, 3, 3};
  const auto per_mean = [](double tokens) { return 19 / (4 * tokens); };
  WeightedSamples samples{.weights = {{per_mean(5), per_mean(5), per_mean(4), per_mean(4)},
                                      {per_mean(4), per_mean(4), per_mean(6), per_mean(6)}},
                          .from_loss = true,
                          .counted = counted};

  EXPECT_THAT(weights_are(samples),
              IsCause(CauseId::kMeanOfRankMeans,
                      {{"means", 4}, {"token_counts", std::vector{5.0, 4.0, 4.0, 6.0}}}));
  samples.weights[1][3] = 0.9;
  EXPECT_THAT(weights_are(samples), IsOnlyOff()) << "one sample has another weight";
}

/// Four micro-batches of a linear module "m" with input "x", 2 samples of 3 tokens on each dp rank.
/// Weight `weights(m, dp rank of the samples, own dp rank)` enters the gradient that a rank
/// records.
Body micro_batches(std::function<double(int m, int dp, int own)> weights, bool whole,
                   bool explained = true) {
  return [=](Sink& sink, int rank) {
    const int own = whole ? 0 : rank / kTp;
    const std::vector<Placement> split =
        whole ? std::vector<Placement>{} : std::vector<Placement>{shard(Axis::kDp, 0)};
    at::Tensor gradient = at::zeros({7, 5});
    for (int m = 0; m < 4; ++m) {
      const at::Tensor x = values({4, 3, 5}, 10 + m), dy = values({4, 3, 7}, 20 + m);
      for (int dp = 0; dp < 2; ++dp) {
        const auto rows = [&](const at::Tensor& t) {
          return t.narrow(0, 2 * dp, 2).reshape({6, -1});
        };
        gradient += weights(m, dp, own) * rows(dy).t().mm(rows(x));
      }
      const auto mine = [&](const at::Tensor& t) { return whole ? t : t.narrow(0, 2 * own, 2); };
      sink.on_record(site(RecordKind::kActivation, "x", layout_of({4, 3, 5}, split)),
                     mine(explained ? x : x.roll(1, 0)));
      sink.on_record(site(RecordKind::kActivation, "m", layout_of({4, 3, 7}, split)),
                     mine(values({4, 3, 7}, 30 + m)));
      sink.on_record(site(RecordKind::kActivationGrad, "m", layout_of({4, 3, 7}, split)), mine(dy));
    }
    sink.on_record(site(RecordKind::kGrad, "m.weight", layout_of({7, 5})), gradient);
  };
}

TEST(RunCauses, MissingUnevenAndUnreducedMicroBatchesAreTold) {
  const auto one = [](int, int, int) { return 1.0; };
  const auto wrong = [&](std::function<double(int, int, int)> weights, bool explained = true) {
    return cause_of(micro_batches(one, true, explained),
                    micro_batches(std::move(weights), false, explained));
  };

  EXPECT_THAT(
      wrong([](int m, int, int) { return m == 3 ? 1.0 : 0.0; }),
      IsCause(CauseId::kMicroBatchMissing,
              {{"present", std::vector{3}}, {"missing", std::vector{0, 1, 2}}, {"last", 3}}));
  EXPECT_THAT(
      wrong([](int m, int, int) { return m == 1 ? 0.0 : 1.0; }),
      IsCause(CauseId::kMicroBatchMissing,
              {{"present", std::vector{0, 2, 3}}, {"missing", std::vector{1}}, {"last", 3}}));
  EXPECT_THAT(wrong([](int m, int dp, int own) { return m < 3       ? 1.0
                                                        : dp == own ? 2.0
                                                                    : 0.0; }),
              IsCause(CauseId::kMicroBatchRankLocal, {{"local", std::vector{3}},
                                                      {"right", std::vector{0, 1, 2}},
                                                      {"last", 3},
                                                      {"axis", "dp"}}));
  EXPECT_THAT(
      wrong([](int m, int, int) { return 1.0 / (1 << (3 - m)); }),
      IsCause(CauseId::kMicroBatchWeights,
              {{"weights", std::vector{0.03125, 0.0625, 0.125, 0.25}}, {"micro_batches", 4}}));
  EXPECT_THAT(wrong([](int, int, int) { return 4.0; }),
              IsCause(CauseId::kScaleOfFormula, {{"formula", "micro-batches"}, {"scale", 4}}));
  EXPECT_THAT(
      wrong([](int, int dp, int own) { return dp == own ? 2.0 : 0.0; }),
      IsCause(CauseId::kRankLocal, {{"axis", "dp"}, {"copies", 2}, {"axes", std::vector{"dp"}}}));
  EXPECT_THAT(wrong([](int m, int, int) { return m == 3 ? 1.0 : 0.0; }, false), IsNoCause())
      << "no input explains the gradient";
}

Body gradient_of(const at::Tensor& value, const std::vector<Placement>& placements = {}) {
  return [=](Sink& sink, int) {
    sink.on_record(site(RecordKind::kGrad, "w", layout_of(value.sizes().vec(), placements)), value);
  };
}

TEST(RunCauses, EachShardMayBeTheMeanOfAll) {
  const at::Tensor whole = values({6, 4}, 1), mean = whole.reshape({3, 2, 4}).mean(0);
  const auto shards = [&](const at::Tensor& held) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kGrad, "w", layout_of({6, 4}, {shard(Axis::kTp, 0)})), held);
    });
  };

  EXPECT_THAT(cause_of(gradient_of(whole), shards(mean)),
              IsCause(CauseId::kMeanOfShards, {{"shards", 3}, {"axis", "tp"}}));
  EXPECT_THAT(cause_of(gradient_of(whole), shards(values({2, 4}, 9))), IsNoCause());
}

TEST(RunCauses, ATiedWeightsNumberOfNamesMayBeTheFactor) {
  const at::Tensor value = values({6, 4}, 1);
  JudgePolicy tied;
  tied.num_names["w"] = 5;

  EXPECT_THAT(cause_of(gradient_of(value), gradient_of(value * 5), tied),
              IsCause(CauseId::kScaleOfFormula, {{"formula", "number of names"}, {"scale", 5}}));
  EXPECT_THAT(cause_of(gradient_of(value), gradient_of(value * 5)),
              IsCause(CauseId::kScale, {{"scale", 5}}));
  tied.num_names["w"] = 3;
  EXPECT_THAT(
      cause_of(gradient_of(value), gradient_of(value * 3), tied),
      IsCause(CauseId::kScaleOfFormula, {{"formula", "tp or number of names"}, {"scale", 3}}));
}

TEST(RunCauses, RowsOfTheBatchsIdsAloneAreTheInputSide) {
  const auto run_with = [](const at::Tensor& value) {
    return Body([=](Sink& sink, int rank) {
      whole_data("input_ids", ids({1, 4, 4, 2}).reshape({2, 2}))(sink, rank);
      gradient_of(value)(sink, rank);
    });
  };
  const at::Tensor value = values({6, 4}, 1);
  const auto rows = [&](std::vector<std::int64_t> present) {
    return at::zeros_like(value).index_copy(
        0, ids(present), values({static_cast<std::int64_t>(present.size()), 4}, 7));
  };

  EXPECT_THAT(cause_of(run_with(value), run_with(rows({1, 2, 4}))),
              IsCause(CauseId::kInputSideOnly, {{"record", "input_ids"}, {"num_rows", 3}}));
  EXPECT_THAT(cause_of(run_with(value), run_with(rows({1, 2, 3}))), IsNoCause())
      << "3 is no id of the batch";
  const at::Tensor untied = rows({1, 2, 4});
  EXPECT_THAT(
      cause_of(run_with(untied), run_with(rows({1, 4}))),
      IsCause(CauseId::kSamplesMissing, {{"num_rows", 1}, {"num_ids", 3}, {"record", "input_ids"}}))
      << "the right gradient has no other rows";
  EXPECT_THAT(cause_of(run_with(value), run_with(values({6, 4}, 3))), IsNoCause());
}

/// kv heads 0 and 1 held by four tp ranks, the output of each rank's query heads made from them.
TEST(RunCauses, PartsHeldOutOfRankOrderAreNamed) {
  const MeshShape four({{Axis::kTp, 4}});
  const at::Tensor kv = values({2, 8}, 1), out = values({4, 8}, 2);
  const Reference r = reference([&](Sink& sink, int) {
    sink.on_record(site(RecordKind::kActivation, "l.attn.k", layout_of({2, 8})), kv);
    sink.on_record(site(RecordKind::kActivation, "l.attn.core", layout_of({4, 8})), out);
  });
  const auto cause = [&](std::array<int, 4> heads, const std::set<int>& wrong) {
    const Trace trace = run(four, &r, [&](Sink& sink, int rank) {
      const int head = heads.at(static_cast<std::size_t>(rank));
      Layout layout = layout_of({2, 8});
      layout.boxes = {Box{{0, 0}, {head, 0}, {1, 8}}};
      layout.explicit_parts = true;
      sink.on_record(site(RecordKind::kActivation, "l.attn.k", layout), kv.narrow(0, head, 1));
      const at::Tensor own =
          wrong.contains(rank) ? values({1, 8}, 50 + rank) : out.narrow(0, rank, 1);
      sink.on_record(
          site(RecordKind::kActivation, "l.attn.core", layout_of({4, 8}, {shard(Axis::kTp, 0)})),
          own);
    });
    JudgePolicy options;
    options.rtol = 1e-6;
    return judge(r, trace, options).findings.at(0).cause;
  };

  EXPECT_THAT(cause({0, 1, 0, 1}, {1, 2}),
              IsCause(CauseId::kPartsOutOfOrder, {{"axis", "tp"},
                                                  {"coordinates", std::vector{1, 2}},
                                                  {"parts", std::vector{1, 0}},
                                                  {"tensor", "l.attn.k"},
                                                  {"expected", std::vector{0, 1}},
                                                  {"ranks", std::vector{1, 2}}}));
  EXPECT_THAT(cause({0, 0, 1, 1}, {1, 2}), IsNoCause()) << "held in order";
  EXPECT_THAT(cause({0, 1, 0, 1}, {1}), IsNoCause()) << "rank 2 holds another part and is right";
}

// Heads that read one kv head give nearly the same: what rank 1 holds looks like a head of rank 2,
// twice.
TEST(RunCauses, PartsOutOfRankOrderComeBeforeValuesThatLookMoved) {
  const at::Tensor kv = values({2, 8}, 1), out = values({8, 8}, 2);
  const Reference r = reference([&](Sink& sink, int) {
    sink.on_record(site(RecordKind::kActivation, "l.attn.k", layout_of({2, 8})), kv);
    sink.on_record(site(RecordKind::kActivation, "l.attn.core", layout_of({8, 8})), out);
  });
  const Trace trace = run(MeshShape({{Axis::kTp, 4}}), &r, [&](Sink& sink, int rank) {
    Layout layout = layout_of({2, 8});
    layout.boxes = {Box{{0, 0}, {rank % 2, 0}, {1, 8}}};
    layout.explicit_parts = true;
    sink.on_record(site(RecordKind::kActivation, "l.attn.k", layout), kv.narrow(0, rank % 2, 1));
    const bool is_wrong = rank == 1 || rank == 2;
    const at::Tensor own =
        is_wrong ? out.narrow(0, rank == 1 ? 4 : 3, 1).repeat({2, 1}) : out.narrow(0, 2 * rank, 2);
    sink.on_record(
        site(RecordKind::kActivation, "l.attn.core", layout_of({8, 8}, {shard(Axis::kTp, 0)})),
        own);
  });
  JudgePolicy options;
  options.rtol = 1e-6;

  EXPECT_THAT(judge(r, trace, options).findings.at(0).cause,
              IsCause(CauseId::kPartsOutOfOrder, {{"axis", "tp"},
                                                  {"coordinates", std::vector{1, 2}},
                                                  {"parts", std::vector{1, 0}},
                                                  {"tensor", "l.attn.k"},
                                                  {"expected", std::vector{0, 1}},
                                                  {"ranks", std::vector{1, 2}}}));
}

TEST(RunCauses, WeightsThatAreNoSliceOfTheReferenceAreToldByCoordinate) {
  const at::Tensor value = values({6, 4}, 1);
  const auto weights = [&](const std::set<int>& drawn_apart, bool split) {
    return Body([=](Sink& sink, int rank) {
      const int tp = rank % kTp;
      const at::Tensor own = split ? value.narrow(0, 2 * tp, 2) : value;
      sink.on_record(site(RecordKind::kParam, "w",
                          split ? layout_of({6, 4}, {shard(Axis::kTp, 0)}) : layout_of({6, 4})),
                     drawn_apart.contains(tp) ? values(own.sizes().vec(), 70 + tp) : own);
    });
  };
  const Body right = [&](Sink& sink, int) {
    sink.on_record(site(RecordKind::kParam, "w", layout_of({6, 4})), value);
  };

  EXPECT_THAT(
      cause_of(right, weights({1, 2}, true)),
      AllOf(IsCause(CauseId::kNotSlices, {{"axis", "tp"}, {"ranks", std::vector{1, 2, 4, 5}}}),
            HasNoValue("axes")));
  EXPECT_THAT(
      cause_of(right, weights({1, 2}, false)),
      IsCause(CauseId::kNotSlices,
              {{"axis", "tp"}, {"ranks", std::vector{1, 2, 4, 5}}, {"axes", std::vector{"tp"}}}));
  EXPECT_THAT(cause_of(right, weights({0, 1, 2}, true)), IsNoCause())
      << "no rank is right: nothing sets them apart";
}

// Two weights of 6 rows that lie one after the other: tp rank r of 3 should have 2 rows of each,
// and has those of 4 r.
TEST(RunCauses, TwoWeightsThatAreCutAsOneAreTold) {
  const at::Tensor gate = values({6, 4}, 1), up = values({6, 4}, 2);
  const auto body = [&](const std::function<at::Tensor(int tp)>& own_gate, bool whole) {
    return Body([=](Sink& sink, int rank) {
      const int tp = rank % kTp;
      const Layout layout = whole ? layout_of({6, 4}) : layout_of({6, 4}, {shard(Axis::kTp, 0)});
      sink.on_record(site(RecordKind::kParam, "l.gate.weight", layout),
                     whole ? gate : own_gate(tp));
      sink.on_record(site(RecordKind::kParam, "l.up.weight", layout),
                     whole ? up : up.narrow(0, 2 * tp, 2));
    });
  };
  const auto wrong = [&](const std::function<at::Tensor(int tp)>& own_gate) {
    return cause_of(body({}, true), body(own_gate, false));
  };

  EXPECT_THAT(wrong([&](int tp) {
                return at::cat({gate, up}).narrow(0, 4 * tp, 2);
              }),
              IsCause(CauseId::kCutAsOneWithOther, {{"axis", "tp"},
                                                    {"coordinate", 1},
                                                    {"first", 4},
                                                    {"last", 5},
                                                    {"holder", "l.gate.weight"},
                                                    {"other", "l.up.weight"},
                                                    {"ranks", std::vector{1, 2, 4, 5}}}));
  EXPECT_THAT(wrong([&](int tp) { return tp == 0 ? gate.narrow(0, 0, 2) : up.narrow(0, 0, 2); }),
              IsCause(CauseId::kNotSlices));
}

TEST(RunCauses, AnOffsetByAParameterNamesIt) {
  const at::Tensor x = values({4, 6, 5}, 1), bias = values({5}, 2);
  const auto body = [&](const at::Tensor& row) {
    return Body([=](Sink& sink, int) {
      sink.on_record(site(RecordKind::kParam, "m.bias", layout_of({5})), bias);
      sink.on_record(site(RecordKind::kActivation, "m", layout_of({4, 6, 5})), x + row);
    });
  };

  EXPECT_THAT(cause_of(body(at::zeros({5})), body(2 * bias)),
              IsCause(CauseId::kParameterAddedTimes,
                      {{"factor", 2}, {"parameter", "m.bias"}, {"axis", "tp"}}));
  EXPECT_THAT(cause_of(body(at::zeros({5})), body(-bias)),
              IsCause(CauseId::kParameterNotAdded, {{"parameter", "m.bias"}}));
  EXPECT_THAT(cause_of(body(at::zeros({5})), body(values({5}, 9))),
              IsCause(CauseId::kSameRowAdded));
}

TEST(RunCauses, CopiesOfSomeRanksOfAGroupMayBePartial) {
  const MeshShape four({{Axis::kTp, 4}});
  const at::Tensor value = values({4, 6}, 1), part = values({2, 6}, 2);
  const Reference r = reference(gradient_of(value));
  const auto cause = [&](double share) {
    const Trace trace = run(four, &r, [&](Sink& sink, int rank) {
      const int head = rank / 2;
      Layout layout = layout_of({4, 6});
      layout.boxes = {Box{{0, 0}, {2 * head, 0}, {2, 6}}};
      layout.explicit_parts = true;
      const at::Tensor own = value.narrow(0, 2 * head, 2);
      sink.on_record(site(RecordKind::kGrad, "w", layout),
                     rank % 2 == 0 ? part : share * own - part);
    });
    JudgePolicy options;
    options.rtol = 1e-6;
    return judge(r, trace, options).findings.at(0).cause;
  };

  EXPECT_THAT(cause(1), IsCause(CauseId::kRankLocalPartial,
                                {{"axis", "tp"}, {"copies", 2}, {"axes", std::vector{"tp"}}}));
  EXPECT_THAT(cause(1.5), IsCause(CauseId::kRankLocal)) << "the sum is not the reference";
}

}  // namespace
}  // namespace isoshard
