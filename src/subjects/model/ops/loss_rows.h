// SPDX-License-Identifier: Apache-2.0
/// Losses of rows (tokens) and their gradients, in blocks: what cross_entropy is made of.
///
/// R rows, V the columns at hand. "wide" is fp32, fp64 for fp64 logits.
#pragma once
#include <ATen/core/Tensor.h>

#include "subjects/model/ops/loss.h"

namespace isoshard::detail {

inline constexpr std::int64_t kIgnored = -100;

/// fp32, or fp64 for fp64 logits.
[[nodiscard]] at::ScalarType wide_type_of(const at::Tensor& logits);

/// What backward needs besides the logits: of split rows the largest logit and the log of the sum
/// of exp(logit - largest).
struct RowLosses {
  at::Tensor loss_R;  ///< wide; of rows that are not counted, any number
  at::Tensor max_R, log_sum_R;
};

/// `targets_R` in the whole vocabulary.   Ranks   as cross_entropy.
[[nodiscard]] RowLosses row_losses(const at::Tensor& logits_RV, const at::Tensor& targets_R,
                                   const LossOptions& options);

/// Writes d(sum over rows of scale[r] * loss[r]) / d logits over the logits, rounded to their
/// dtype. Local. `scale_R`: wide, 0 for rows that are not counted.
void write_row_gradients(const at::Tensor& logits_RV, const at::Tensor& targets_R,
                         const at::Tensor& scale_R, const RowLosses& losses,
                         const LossOptions& options);

}  // namespace isoshard::detail
