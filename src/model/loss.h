// SPDX-License-Identifier: Apache-2.0
/// The one cross-entropy that reference and subjects share.
#pragma once
#include <ATen/core/Tensor.h>

namespace isoshard {

/// Targets for next-token prediction: labels moved one place to the left, -100 in the last column.
/// Shapes   int64 [B,S] -> int64 [B,S].
[[nodiscard]] at::Tensor shift_labels(const at::Tensor& labels_BS);

struct CrossEntropy {
  at::Tensor loss;            ///< scalar, fp32 (fp64 for fp64 logits), differentiable: sum over b of weight[b] * sum over t of loss[b,t]
  at::Tensor sample_sum_B;    ///< detached, sum over t of loss[b,t]
  at::Tensor sample_count_B;  ///< int64, counted tokens
};

/// Cross-entropy of fp32 log-softmax (fp64 for fp64 logits), summed per sample and weighted.
///
/// Shapes   logits [B,S,V]; targets int64 [B,S], -100 is not counted; weight [B] in fp64.
/// The gradient reaches the logits in their own dtype.
/// Source   torch.nn.functional.cross_entropy(reduction="sum") per sample.
[[nodiscard]] CrossEntropy cross_entropy(const at::Tensor& logits_BSV, const at::Tensor& targets_BS, const at::Tensor& weight_B);

}  // namespace isoshard
