// SPDX-License-Identifier: Apache-2.0
/// Causes inside of a cross entropy whose columns tp ranks share out, and beside each a run that
/// looks like it and is not.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "harness/testing/diagnosed_run.h"
#include "harness/testing/is_cause.h"
#include "harness/testing/synthetic.h"

namespace isoshard {
namespace {

using namespace synthetic;
using namespace causes_testing;

/// 4 samples of 7 tokens over 17 columns, which three tp ranks pad to 18; the last token of a
/// sample has no target.
constexpr std::int64_t kSamples = 4, kLength = 7, kColumns = 17, kOwnColumns = 6;
constexpr double kSmoothing = 0.1;

at::Tensor labels_of_all() {
  return (at::arange(kSamples * kLength, at::kLong) * 5 % kColumns).reshape({kSamples, kLength});
}
at::Tensor logits_of_all() {
  return values({kSamples, kLength, kColumns}, 3) * 3 + 2;  // means over columns that are not 0
}
/// The column that follows each token but the last of a sample.
at::Tensor targets_of_all() {
  return labels_of_all().slice(1, 1);
}
at::Tensor rows_with_target(const at::Tensor& all) {
  return all.slice(1, 0, -1).to(at::kDouble);
}

/// What ranks have of a tensor over the columns.
void record_columns(Sink& sink, RecordKind kind, const at::Tensor& all, int tp, bool whole) {
  Layout layout = layout_of({kSamples, kLength, kColumns});
  at::Tensor own = all;
  if (!whole) {
    const std::int64_t begin = kOwnColumns * tp, count = std::min(kOwnColumns, kColumns - begin);
    layout.explicit_parts = true;
    layout.boxes = {Box{{0, 0, 0}, {0, 0, begin}, {kSamples, kLength, count}}};
    own = at::constant_pad_nd(all, {0, 1}).narrow(2, begin, kOwnColumns).contiguous();
  }
  sink.on_record(site(kind, "head", layout), own);
}

/// The mean of what `per_column` says that each column would lose, and of the targets' losses.
using PerColumn = std::function<at::Tensor(at::Tensor logits, at::Tensor lse)>;

Cause smoothed_loss_is(const PerColumn& mean_of_columns, double share_factor = 1) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor rows = rows_with_target(logits_of_all()), lse = rows.logsumexp(2);
      const double share = kSmoothing * kColumns / (kColumns - 1) * (whole ? 1 : share_factor);
      const at::Tensor nll = lse - rows.gather(2, targets_of_all().unsqueeze(2)).squeeze(2);
      const at::Tensor mean = whole ? lse - rows.mean(2) : mean_of_columns(rows, lse);
      sink.on_record(site(RecordKind::kDataId, "labels", layout_of({kSamples, kLength})),
                     labels_of_all());
      record_columns(sink, RecordKind::kActivation, logits_of_all(), rank % kTp, whole);
      sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                     ((1 - share) * nll + share * mean).mean().reshape({1}));
    });
  };
  return cause_of(body(true), body(false));
}

TEST(SoftmaxCauses, SmoothingOverThePaddedColumnsIsTold) {
  const auto is_over_padding =
      IsCause(CauseId::kSmoothingOverPadding,
              {{"smoothing", 0.1}, {"padded", 18}, {"head", "head"}, {"width", 17}});

  EXPECT_THAT(smoothed_loss_is([](const at::Tensor& rows, const at::Tensor& lse) {
                return lse - rows.sum(2) / 18;
              }),
              is_over_padding);
  EXPECT_THAT(smoothed_loss_is([](const at::Tensor& rows, const at::Tensor& lse) {
                const at::Tensor largest = rows.amax(2);
                return lse - largest - (rows - largest.unsqueeze(2)).sum(2) / 18;
              }),
              is_over_padding)
      << "each row's largest logit is taken off first";
  EXPECT_THAT(smoothed_loss_is([](const at::Tensor& rows,
                                  const at::Tensor& lse) { return lse - rows.sum(2) / 18; },
                               18.0 / 17 * 16 / 17),
              is_over_padding)
      << "the share of the mean counts 18 columns, too";
  EXPECT_THAT(smoothed_loss_is([](const at::Tensor& rows, const at::Tensor& lse) {
                return lse - rows.sum(2) / 19;
              }),
              IsOnlyOff())
      << "a number of columns that nothing has";
  EXPECT_THAT(smoothed_loss_is([](const at::Tensor& rows, const at::Tensor& lse) {
                return 1.02 * (lse - rows.mean(2));
              }),
              IsOnlyOff());
}

/// The loss and the gradient at the logits, made from sums of exponentials of each rank's columns
/// [B,S,3]; `sum` makes one of them, and `gradient` may change the gradient besides.
using SumOf = std::function<at::Tensor(at::Tensor parts)>;
using GradientOf = std::function<at::Tensor(at::Tensor)>;

Cause sums_are(const SumOf& sum, const GradientOf& gradient = nullptr, bool has_gradient = true,
               bool has_loss = true, bool is_cut = true) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor logits = logits_of_all().to(at::kDouble), largest = logits.amax(2, true),
                       exponentials = (logits - largest).exp(),
                       parts = at::constant_pad_nd(exponentials, {0, 1})
                                   .reshape({kSamples, kLength, kTp, kOwnColumns})
                                   .sum(3);
      const at::Tensor all = whole ? parts.sum(2) : sum(parts);
      const at::Tensor target = at::constant_pad_nd(targets_of_all(), {0, 1}),
                       has_target = at::constant_pad_nd(at::ones({kSamples, kLength - 1}), {0, 1}),
                       hot = at::one_hot(target, kColumns);
      const at::Tensor losses =
          (all.log() + largest.squeeze(2) - (logits * hot).sum(2)) * has_target;
      at::Tensor dy =
          ((exponentials / all.unsqueeze(2) - hot) * has_target.unsqueeze(2) / has_target.sum())
              .to(at::kFloat);
      if (!whole && gradient != nullptr) dy = gradient(dy);
      sink.on_record(site(RecordKind::kDataId, "labels", layout_of({kSamples, kLength})),
                     labels_of_all());
      const bool has_all = whole || !is_cut;
      record_columns(sink, RecordKind::kActivation, logits_of_all(), rank % kTp, has_all);
      if (has_loss)
        sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})),
                       (losses.sum() / has_target.sum()).reshape({1}));
      if (has_gradient) record_columns(sink, RecordKind::kActivationGrad, dy, rank % kTp, has_all);
    });
  };
  return cause_of(body(true), body(false));
}

at::Tensor as_bf16(const at::Tensor& x) {
  return x.to(at::kFloat).to(at::kBFloat16).to(at::kDouble);
}

TEST(SoftmaxCauses, SumsOfExponentialsThatAreRoundedAreTold) {
  const SumOf of_rounded = [](const at::Tensor& parts) { return as_bf16(parts).sum(2); };

  EXPECT_THAT(sums_are(of_rounded), IsCause(CauseId::kExponentialsOfRankRounded,
                                            {{"dtype", "bf16"}, {"num_tokens", 24}}));
  EXPECT_THAT(
      sums_are(of_rounded, nullptr, true, false),
      IsCause(CauseId::kExponentialsOfRankRounded, {{"dtype", "bf16"}, {"num_tokens", 24}}));
  EXPECT_THAT(sums_are([](const at::Tensor& parts) { return as_bf16(parts.sum(2)); }),
              IsCause(CauseId::kExponentialsRounded, {{"dtype", "bf16"}}));
  EXPECT_THAT(sums_are([](const at::Tensor& parts) { return as_bf16(parts.sum(2)); }, nullptr, true,
                       true, /*is_cut=*/false),
              IsCause(CauseId::kExponentialsRounded, {{"dtype", "bf16"}}))
      << "ranks that hold all columns add no sums";
  EXPECT_THAT(sums_are([](const at::Tensor& parts) { return as_bf16(parts.sum(2).log()).exp(); }),
              IsCause(CauseId::kLogarithmRounded, {{"dtype", "bf16"}}));
  EXPECT_THAT(sums_are(of_rounded, nullptr, /*has_gradient=*/false), IsOnlyOff())
      << "one number is off by about as much for many reasons";
  EXPECT_THAT(sums_are([](const at::Tensor& parts) {
                return parts.sum(2) * (1 + 2e-3 * values({kSamples, kLength}, 8).to(at::kDouble));
              }),
              IsOnlyOff())
      << "factors of that size that no rounding makes";
  EXPECT_THAT(sums_are(of_rounded,
                       [](at::Tensor dy) {
                         dy.select(0, 1).select(0, 2).select(0, 3).mul_(1.5);
                         return dy;
                       }),
              IsOnlyOff())
      << "one token is off in another way";
}

/// The loss as `per_token` makes it of the logits of tokens with a target and of their targets.
Cause loss_is(const std::function<at::Tensor(at::Tensor logits, at::Tensor targets)>& per_token,
              double smoothing = 0) {
  const auto body = [&](bool whole) {
    return Body([=](Sink& sink, int rank) {
      const at::Tensor rows = rows_with_target(logits_of_all()), targets = targets_of_all();
      const at::Tensor right = rows.logsumexp(2) - rows.gather(2, targets.unsqueeze(2)).squeeze(2),
                       all = rows.logsumexp(2) - rows.mean(2);
      sink.on_record(site(RecordKind::kDataId, "labels", layout_of({kSamples, kLength})),
                     labels_of_all());
      record_columns(sink, RecordKind::kActivation, logits_of_all(), rank % kTp, whole);
      const at::Tensor own =
          whole ? right * (1 - smoothing) + all * smoothing : per_token(rows, targets);
      sink.on_record(site(RecordKind::kScalar, "loss", layout_of({1})), own.mean().reshape({1}));
    });
  };
  return cause_of(body(true), body(false));
}

/// Each rank's columns, from which their own largest logit is taken off, and what that gives.
at::Tensor with_own_maxima(const at::Tensor& rows, const at::Tensor& targets, double smoothing) {
  at::Tensor shifted = rows.clone();
  for (std::int64_t begin = 0; begin < kColumns; begin += kOwnColumns) {
    const at::Tensor own = shifted.narrow(2, begin, std::min(kOwnColumns, kColumns - begin));
    own.sub_(own.amax(2, true));
  }
  const at::Tensor log_sum = shifted.exp().sum(2).log();
  return (log_sum - shifted.gather(2, targets.unsqueeze(2)).squeeze(2)) * (1 - smoothing) +
         (log_sum - shifted.mean(2)) * smoothing;
}

TEST(SoftmaxCauses, LargestLogitsOfEachRanksOwnColumnsAreTold) {
  EXPECT_THAT(loss_is([](auto rows, auto targets) { return with_own_maxima(rows, targets, 0); }),
              IsCause(CauseId::kOwnLargestLogit));
  EXPECT_THAT(
      loss_is([](auto rows, auto targets) { return with_own_maxima(rows, targets, kSmoothing); },
              kSmoothing),
      IsCause(CauseId::kOwnLargestLogit));
  EXPECT_THAT(
      loss_is([](auto rows, auto targets) { return with_own_maxima(rows, targets, 0) * 1.01; }),
      IsOnlyOff());
}

/// Targets in the columns are lost: their logit counts as the largest one.
at::Tensor without_targets(const at::Tensor& rows, const at::Tensor& targets,
                           const std::vector<std::int64_t>& columns) {
  at::Tensor found = rows.gather(2, targets.unsqueeze(2)).squeeze(2);
  for (const std::int64_t column : columns)
    found = at::where(targets == column, rows.amax(2), found);
  return rows.logsumexp(2) - found;
}

TEST(SoftmaxCauses, TargetsThatNoRankFindsAreTold) {
  const auto lost = [](const std::vector<std::int64_t>& columns) {
    return loss_is(
        [=](auto rows, auto targets) { return without_targets(rows, targets, columns); });
  };

  EXPECT_THAT(lost({6, 12}), IsCause(CauseId::kTargetsInFirstColumnLost));
  EXPECT_THAT(lost({5, 11, 16}), IsCause(CauseId::kTargetsInLastColumnLost));
  EXPECT_THAT(lost({7, 13}), IsOnlyOff());
}

TEST(SoftmaxCauses, GradientsOfTokensWithoutATargetAreTold) {
  const SumOf right = [](const at::Tensor& parts) { return parts.sum(2); };
  const auto at_last_tokens = [](at::Tensor dy) {
    dy.select(1, kLength - 1).fill_(0.01);
    return dy;
  };

  EXPECT_THAT(sums_are(right, at_last_tokens, true, false),
              IsCause(CauseId::kUncountedTokens, {{"num_tokens", 4}}));
  EXPECT_THAT(sums_are(
                  right,
                  [&](at::Tensor dy) {
                    dy.select(1, 0).mul_(1.5);
                    return at_last_tokens(dy);
                  },
                  true, false),
              IsNoCause())
      << "tokens with a target are wrong, too";
  EXPECT_THAT(sums_are(
                  right,
                  [](at::Tensor dy) {
                    dy[0][kLength - 1][0] = 0.01;
                    return dy;
                  },
                  true, false),
              IsCause(CauseId::kOneElementWrong))
      << "one element is no token";
}

}  // namespace
}  // namespace isoshard
