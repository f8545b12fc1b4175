// SPDX-License-Identifier: Apache-2.0
// Log-softmax of rows, whole or split over ranks.
//
// A row is one token: its numbers come from its own logits alone, so neither value nor gradient of
// a row depends on how many others there are or on how rows are cut into blocks. Backward computes
// the log-softmax of a block again from the logits.
#include "subjects/model/ops/loss_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "core/comm/tensor.h"

namespace isoshard::detail {
namespace {

// a few temporaries of a block fit into a core's cache
constexpr std::int64_t kBlockElements = std::int64_t{1} << 18;

/// Calls `visit(first row, number of rows)` for each block.
template <class Visit>
void for_each_block(std::int64_t rows, std::int64_t columns, const LossOptions& options,
                    Visit visit) {
  const std::int64_t usual =
      std::max<std::int64_t>(1, kBlockElements / std::max<std::int64_t>(1, columns));
  const std::int64_t block = options.block_rows > 0 ? options.block_rows : usual;
  for (std::int64_t first = 0; first < rows; first += block)
    visit(first, std::min(block, rows - first));
}

/// s = a V / (V - 1): so much of the mean over the vocabulary is in a smoothed loss.
double share_of_mean(double smoothing, std::int64_t vocabulary) {
  if (smoothing == 0) return 0;
  return smoothing * static_cast<double>(vocabulary) / static_cast<double>(vocabulary - 1);
}

at::Tensor whole_losses(const at::Tensor& logits_RV, const at::Tensor& targets_R,
                        const LossOptions& options) {
  const double share = share_of_mean(options.label_smoothing, logits_RV.size(1));
  at::Tensor losses_R =
      at::empty({logits_RV.size(0)}, logits_RV.options().dtype(wide_type_of(logits_RV)));
  for_each_block(
      logits_RV.size(0), logits_RV.size(1), options, [&](std::int64_t first, std::int64_t rows) {
        const at::Tensor targets = targets_R.narrow(0, first, rows).clamp_min(0);
        const at::Tensor log_p =
            at::log_softmax(logits_RV.narrow(0, first, rows), -1, wide_type_of(logits_RV));
        at::Tensor losses = log_p.gather(1, targets.unsqueeze(1)).squeeze(1).neg();
        if (share != 0) losses = losses * (1 - share) - log_p.mean(1) * share;
        losses_R.narrow(0, first, rows).copy_(losses);
      });
  return losses_R;
}

void write_whole_gradients(const at::Tensor& logits_RV, const at::Tensor& targets_R,
                           const at::Tensor& scale_R, const LossOptions& options) {
  const std::int64_t vocabulary = logits_RV.size(1);
  const double share = share_of_mean(options.label_smoothing, vocabulary);
  for_each_block(
      logits_RV.size(0), vocabulary, options, [&](std::int64_t first, std::int64_t rows) {
        const at::Tensor targets = targets_R.narrow(0, first, rows).clamp_min(0).unsqueeze(1);
        const at::Tensor scale = scale_R.narrow(0, first, rows).unsqueeze(1);
        at::Tensor block = logits_RV.narrow(0, first, rows);
        const at::Tensor log_p = at::log_softmax(block, -1, wide_type_of(logits_RV));
        // d loss / d log p: what every entry gets, and what the target gets besides.
        at::Tensor wide = at::zeros_like(log_p);
        if (share != 0) wide.sub_(scale * (share / static_cast<double>(vocabulary)));
        wide.scatter_add_(1, targets, share != 0 ? scale * (share - 1) : scale.neg());
        block.copy_(at::_log_softmax_backward_data(wide, log_p, -1, log_p.scalar_type()));
      });
}

void reduce_over(Communicator& tp, const at::Tensor& values_R, Reduction reduction,
                 Purpose purpose) {
  const Segment segment{"lm_head", ParamClass::kOther, 0, values_R.numel()};
  all_reduce(tp, values_R, reduction, {purpose, Axis::kTp, std::span(&segment, 1)}).wait();
}

/// The targets as columns of this shard, -1 where another shard has them.
at::Tensor own_targets(const at::Tensor& targets_R, const VocabShard& shard) {
  const at::Tensor local_R = targets_R - shard.begin;
  return local_R.masked_fill((local_R < 0) | (local_R >= shard.count), -1);
}

RowLosses split_losses(const at::Tensor& logits_RV, const at::Tensor& targets_R,
                       const LossOptions& options) {
  const VocabShard& shard = options.shard;
  const std::int64_t rows = logits_RV.size(0);
  const at::Tensor true_RV = logits_RV.narrow(1, 0, shard.count),
                   own_R = own_targets(targets_R, shard);
  const double share = share_of_mean(options.label_smoothing, shard.whole);
  const at::TensorOptions wide = logits_RV.options().dtype(wide_type_of(logits_RV));
  at::Tensor max_R = at::full({rows}, -std::numeric_limits<double>::infinity(), wide);
  if (shard.count > 0) max_R.copy_(true_RV.amax(1));
  reduce_over(*options.tp, max_R, Reduction::kMax, Purpose::kVocabParallelMax);

  at::Tensor sum_R = at::zeros({rows}, wide), target_R = at::zeros({rows}, wide),
             total_R = at::zeros({rows}, wide);
  if (shard.count > 0) {
    for_each_block(rows, shard.count, options, [&](std::int64_t first, std::int64_t count) {
      const at::Tensor shifted = true_RV.narrow(0, first, count).to(wide.dtype()) -
                                 max_R.narrow(0, first, count).unsqueeze(1);
      const at::Tensor own = own_R.narrow(0, first, count);
      const at::Tensor picked = shifted.gather(1, own.clamp_min(0).unsqueeze(1)).squeeze(1);
      target_R.narrow(0, first, count).copy_(picked.masked_fill(own < 0, 0));
      if (share != 0) total_R.narrow(0, first, count).copy_(shifted.sum(1));
      sum_R.narrow(0, first, count).copy_(shifted.exp().sum(1));
    });
  }
  reduce_over(*options.tp, sum_R, Reduction::kSum, Purpose::kVocabParallelLogsumexp);
  reduce_over(*options.tp, target_R, Reduction::kSum, Purpose::kVocabParallelTarget);
  at::Tensor log_sum_R = sum_R.log();
  at::Tensor loss_R = log_sum_R - target_R;
  if (share != 0) {
    reduce_over(*options.tp, total_R, Reduction::kSum, Purpose::kVocabParallelSmoothing);
    loss_R =
        loss_R * (1 - share) + (log_sum_R - total_R / static_cast<double>(shard.whole)) * share;
  }
  return {std::move(loss_R), std::move(max_R), std::move(log_sum_R)};
}

void write_split_gradients(const at::Tensor& logits_RV, const at::Tensor& targets_R,
                           const at::Tensor& scale_R, const RowLosses& losses,
                           const LossOptions& options) {
  const VocabShard& shard = options.shard;
  logits_RV.narrow(1, shard.count, shard.rows - shard.count).zero_();
  if (shard.count == 0) return;
  const at::Tensor true_RV = logits_RV.narrow(1, 0, shard.count),
                   own_R = own_targets(targets_R, shard);
  const double share = share_of_mean(options.label_smoothing, shard.whole);
  for_each_block(
      logits_RV.size(0), shard.count, options, [&](std::int64_t first, std::int64_t rows) {
        const auto column = [&](const at::Tensor& values_R) {
          return values_R.narrow(0, first, rows).unsqueeze(1);
        };
        const at::Tensor own = column(own_R);
        at::Tensor block = true_RV.narrow(0, first, rows);
        at::Tensor wide =
            ((block.to(scale_R.scalar_type()) - column(losses.max_R)) - column(losses.log_sum_R))
                .exp();
        if (share != 0) wide.sub_(share / static_cast<double>(shard.whole));
        wide.scatter_add_(1, own.clamp_min(0), (own >= 0).to(wide.scalar_type()) * (share - 1));
        block.copy_(wide * column(scale_R));
      });
}

}  // namespace

at::ScalarType wide_type_of(const at::Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

RowLosses row_losses(const at::Tensor& logits_RV, const at::Tensor& targets_R,
                     const LossOptions& options) {
  if (options.tp != nullptr) return split_losses(logits_RV, targets_R, options);
  return {whole_losses(logits_RV, targets_R, options), {}, {}};
}

void write_row_gradients(const at::Tensor& logits_RV, const at::Tensor& targets_R,
                         const at::Tensor& scale_R, const RowLosses& losses,
                         const LossOptions& options) {
  if (options.tp != nullptr)
    return write_split_gradients(logits_RV, targets_R, scale_R, losses, options);
  write_whole_gradients(logits_RV, targets_R, scale_R, options);
}

}  // namespace isoshard::detail
