// SPDX-License-Identifier: Apache-2.0
// The sum of the targets' logits.
#include "model/linear_loss.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"

namespace isoshard {
namespace {

constexpr std::int64_t kIgnored = -100;

void check_arguments(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weight) {
  if (logits.dim() != 3 || targets.sizes() != logits.sizes().slice(0, 2) || weight.dim() != 1 || weight.size(0) != logits.size(0)) {
    throw ShapeError(fmt::format("logits [{}], targets [{}] and weights [{}] do not fit: expected [B, S, V], [B, S] and [B]",
                                 fmt::join(logits.sizes(), ", "), fmt::join(targets.sizes(), ", "), fmt::join(weight.sizes(), ", ")));
  }
  const at::Tensor wrong = (targets != kIgnored) & ((targets < 0) | (targets >= logits.size(2)));
  if (wrong.any().item<bool>()) {
    throw ShapeError(fmt::format("target {} is outside the vocabulary of {} (not counted is {})",
                                 targets.masked_select(wrong)[0].item<std::int64_t>(), logits.size(2), kIgnored));
  }
}

}  // namespace

CrossEntropy linear_loss(const at::Tensor& logits_BSV, const at::Tensor& targets_BS, const at::Tensor& weight_B) {
  check_arguments(logits_BSV, targets_BS, weight_B);
  const at::Tensor counted_BS = targets_BS != kIgnored;
  const at::Tensor picked_BS = logits_BSV.gather(2, targets_BS.clamp_min(0).unsqueeze(2)).squeeze(2).to(at::kDouble);
  const at::Tensor sums_B = at::where(counted_BS, picked_BS.neg(), at::zeros_like(picked_BS)).sum(1);
  return {(weight_B * sums_B).sum(), sums_B.detach(), counted_BS.sum(1)};
}

}  // namespace isoshard
