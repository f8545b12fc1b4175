// SPDX-License-Identifier: Apache-2.0
// The sum of the targets' logits.
#include "subjects/model/ops/linear_loss.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <span>

#include "core/base/error.h"
#include "core/comm/tensor.h"
#include "subjects/model/ops/loss_rows.h"

namespace isoshard {
namespace {

using detail::kIgnored;

// The columns at hand.
VocabShard columns_of(const at::Tensor& logits, const LossOptions& options) {
  if (options.tp != nullptr) return options.shard;
  return {logits.size(-1), 0, logits.size(-1), logits.size(-1)};
}

void check_linear_arguments(const at::Tensor& logits, const at::Tensor& targets,
                            const at::Tensor& weight, const VocabShard& columns) {
  if (logits.dim() != 3 || logits.size(2) != columns.rows ||
      targets.sizes() != logits.sizes().slice(0, 2) || weight.dim() != 1 ||
      weight.size(0) != logits.size(0)) {
    throw ShapeError(fmt::format(
        "logits, targets and weights must be [B, S, V], [B, S] and [B], got [{}], [{}] and [{}]",
        fmt::join(logits.sizes(), ", "), fmt::join(targets.sizes(), ", "),
        fmt::join(weight.sizes(), ", ")));
  }
  const at::Tensor wrong = (targets != kIgnored) & ((targets < 0) | (targets >= columns.whole));
  if (wrong.any().item<bool>()) {
    throw ShapeError(fmt::format(
        "a target must be below the vocabulary size {}, or {} where it is not counted, got {}",
        columns.whole, kIgnored, targets.masked_select(wrong)[0].item<std::int64_t>()));
  }
}

// With the ranks' sum as its value and the own part's gradient.
at::Tensor summed(const at::Tensor& own_BS, Communicator& tp) {
  const at::Tensor sum_BS = own_BS.detach().clone();
  const Segment segment{"lm_head", ParamClass::kOther, 0, sum_BS.numel()};
  all_reduce(tp, sum_BS, Reduction::kSum,
             {Purpose::kVocabParallelTarget, Axis::kTp, std::span(&segment, 1)})
      .wait();
  return own_BS + (sum_BS - own_BS.detach());
}

}  // namespace

CrossEntropy linear_loss(const at::Tensor& logits_BSV, const at::Tensor& targets_BS,
                         const at::Tensor& weight_B, const LossOptions& options) {
  const VocabShard columns = columns_of(logits_BSV, options);
  check_linear_arguments(logits_BSV, targets_BS, weight_B, columns);
  const at::Tensor local_BS = targets_BS - columns.begin;
  const at::Tensor here_BS = (local_BS >= 0) & (local_BS < columns.count);  // -100 is nowhere
  const at::Tensor picked_BS = logits_BSV.gather(2, local_BS.masked_fill(~here_BS, 0).unsqueeze(2))
                                   .squeeze(2)
                                   .to(at::kDouble);
  at::Tensor loss_BS = at::where(here_BS, picked_BS.neg(), at::zeros_like(picked_BS));
  if (options.tp != nullptr) loss_BS = summed(loss_BS, *options.tp);
  const at::Tensor sums_B = loss_BS.sum(1);
  return {(weight_B * sums_B).sum(), sums_B.detach(), (targets_BS != kIgnored).sum(1)};
}

}  // namespace isoshard
