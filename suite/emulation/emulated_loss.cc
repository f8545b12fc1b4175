// SPDX-License-Identifier: Apache-2.0
// Cross-entropy of split logits: forward, then at once its gradient.
//
// R tokens, V columns. Names in comments are those of SplitVocabulary.
#include "suite/emulation/emulated_loss.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "core/base/error.h"
#include "suite/emulation/emulated_reduction.h"

namespace isoshard {
namespace {

// One rank's columns and tokens.
struct Columns {
  at::Tensor own_RV;      // without padding, in the logits' dtype
  at::Tensor target_R1;   // column of the target here, 0 where it is not
  at::Tensor is_here_R1;  // whether it is
  at::ScalarType wide;
  std::int64_t rows_per_block;

  [[nodiscard]] std::int64_t rows() const { return own_RV.size(0); }
  [[nodiscard]] bool all_padding() const { return own_RV.size(1) == 0; }
  [[nodiscard]] at::Tensor numbers(double value) const {
    return at::full({rows(), 1}, value, own_RV.options().dtype(wide));
  }

  template <class Visit>
  void for_blocks(Visit visit) const {
    if (all_padding()) return;
    for (std::int64_t first = 0; first < rows(); first += rows_per_block)
      visit(first, std::min(rows_per_block, rows() - first));
  }
  // x - M
  [[nodiscard]] at::Tensor shifted(const at::Tensor& largest_R1, std::int64_t first,
                                   std::int64_t rows) const {
    return own_RV.narrow(0, first, rows).to(wide) - largest_R1.narrow(0, first, rows);
  }
};

Columns columns_of(const SplitVocabulary& vocabulary, const Range& entries,
                   const at::Tensor& logits_RV, const at::Tensor& targets_R) {
  if (entries.count > logits_RV.size(1)) {
    throw ShapeError(
        fmt::format("the declared arithmetic gives a rank {} entries of the vocabulary; its logits "
                    "have {} columns",
                    entries.count, logits_RV.size(1)));
  }
  const at::Tensor is_here =
      targets_R.ge(entries.begin).logical_and(targets_R.lt(entries.begin + entries.count));
  const at::Tensor column = (targets_R - entries.begin) * is_here;
  return {logits_RV.narrow(1, 0, entries.count), column.unsqueeze(1), is_here.unsqueeze(1),
          float_type_of(vocabulary.loss_dtype),
          std::max<std::int64_t>(
              1, vocabulary.logits_per_block / std::max<std::int64_t>(1, entries.count))};
}

// What ranks know together of each token.
struct TokenNumbers {
  at::Tensor largest_R1, log_sum_R1, target_R1, total_R1;  // M, log E, T, S
};

TokenNumbers numbers_of(const Columns& columns, const SplitVocabulary& vocabulary, bool smoothed,
                        const ReduceOverTp& reduce) {
  at::Tensor largest = columns.numbers(-std::numeric_limits<double>::infinity());
  if (!columns.all_padding()) largest = columns.own_RV.amax(1, /*keepdim=*/true).to(columns.wide);
  largest = reduce("largest logit", largest, vocabulary.largest_logit);
  const at::Tensor sum = columns.numbers(0), target = columns.numbers(0),
                   total = columns.numbers(0);
  columns.for_blocks([&](std::int64_t first, std::int64_t rows) {
    const at::Tensor shifted = columns.shifted(largest, first, rows);
    sum.narrow(0, first, rows).copy_(shifted.exp().sum(1, /*keepdim=*/true));
    if (smoothed) total.narrow(0, first, rows).copy_(shifted.sum(1, /*keepdim=*/true));
    const at::Tensor picked = shifted.gather(1, columns.target_R1.narrow(0, first, rows));
    target.narrow(0, first, rows)
        .copy_(
            at::where(columns.is_here_R1.narrow(0, first, rows), picked, at::zeros_like(picked)));
  });
  TokenNumbers numbers{largest, {}, {}, {}};
  numbers.log_sum_R1 = reduce("sum of exponentials", sum, vocabulary.sum_of_exponentials).log();
  numbers.target_R1 = reduce("target logit", target, vocabulary.target_logit);
  if (smoothed) numbers.total_R1 = reduce("sum of logits", total, vocabulary.sum_of_logits);
  return numbers;
}

// The gradient of all columns; that of padding is 0.
at::Tensor gradient_of(const Columns& columns, const TokenNumbers& numbers, double share,
                       double mean_share, const at::Tensor& weight_R1,
                       const at::Tensor& logits_RV) {
  const at::Tensor gradient_RV = at::zeros_like(logits_RV);
  const at::Tensor at_target =
      at::where(columns.is_here_R1, columns.numbers(share - 1), columns.numbers(0));
  columns.for_blocks([&](std::int64_t first, std::int64_t rows) {
    const auto block = [&](const at::Tensor& tensor) { return tensor.narrow(0, first, rows); };
    at::Tensor p =
        (columns.shifted(numbers.largest_R1, first, rows) - block(numbers.log_sum_R1)).exp();
    if (share != 0) p -= mean_share;
    p.scatter_add_(1, block(columns.target_R1), block(at_target));
    block(gradient_RV).narrow(1, 0, columns.own_RV.size(1)).copy_(p * block(weight_R1));
  });
  return gradient_RV;
}

}  // namespace

SplitLoss emulated_split_loss(const SplitVocabulary& vocabulary, int tp_rank,
                              double label_smoothing, const at::Tensor& logits_BSV,
                              const at::Tensor& targets_BS, const at::Tensor& weight_B,
                              const ReduceOverTp& reduce) {
  const at::NoGradGuard no_grad;
  const Range& entries = vocabulary.by_rank.at(static_cast<std::size_t>(tp_rank));
  const at::Tensor logits_RV = logits_BSV.detach().flatten(0, 1);
  const Columns columns = columns_of(vocabulary, entries, logits_RV, targets_BS.flatten());
  const auto size = static_cast<double>(vocabulary.size);
  const double share = label_smoothing == 0 ? 0 : label_smoothing * size / (size - 1);
  const TokenNumbers numbers = numbers_of(columns, vocabulary, share != 0, reduce);

  at::Tensor loss_R1 = numbers.log_sum_R1 - numbers.target_R1;
  if (share != 0)
    loss_R1 = loss_R1 * (1 - share) + (numbers.log_sum_R1 - numbers.total_R1 / size) * share;
  const at::Tensor is_counted_BS = targets_BS.ge(0);
  const at::Tensor loss_BS = loss_R1.view(targets_BS.sizes());
  const at::Tensor counted_BS = at::where(is_counted_BS, loss_BS, at::zeros_like(loss_BS));
  const at::Tensor weight_BS =
      (weight_B.to(columns.wide).unsqueeze(1) * is_counted_BS).contiguous();
  const at::Tensor gradient_RV =
      gradient_of(columns, numbers, share, share / size, weight_BS.view({-1, 1}), logits_RV);
  return {counted_BS.to(at::kDouble).sum(1), gradient_RV.view(logits_BSV.sizes())};
}

SplitLoss emulated_split_linear_loss(const SplitVocabulary& vocabulary, int tp_rank,
                                     const at::Tensor& logits_BSV, const at::Tensor& targets_BS,
                                     const at::Tensor& weight_B, const ReduceOverTp& reduce) {
  const at::NoGradGuard no_grad;
  const Range& entries = vocabulary.by_rank.at(static_cast<std::size_t>(tp_rank));
  const at::Tensor logits_RV = logits_BSV.detach().flatten(0, 1);
  const Columns columns = columns_of(vocabulary, entries, logits_RV, targets_BS.flatten());
  const at::Tensor gradient_RV = at::zeros_like(logits_RV);
  at::Tensor loss_R1 = at::zeros({logits_RV.size(0), 1}, logits_RV.options().dtype(at::kDouble));
  if (!columns.all_padding()) {
    loss_R1 = at::where(columns.is_here_R1,
                        columns.own_RV.gather(1, columns.target_R1).neg().to(at::kDouble), loss_R1);
    const at::Tensor weight_R1 = weight_B.unsqueeze(1).expand(targets_BS.sizes()).reshape({-1, 1});
    // no -0 elsewhere
    const at::Tensor at_target_R1 =
        at::where(columns.is_here_R1, weight_R1.neg(), at::zeros_like(weight_R1));
    gradient_RV.scatter_(1, columns.target_R1, at_target_R1.to(logits_RV.scalar_type()));
  }
  const at::Tensor sum_R1 = reduce("target logit", loss_R1, vocabulary.target_logit);
  return {sum_R1.view(targets_BS.sizes()).sum(1), gradient_RV.view(logits_BSV.sizes())};
}

}  // namespace isoshard
