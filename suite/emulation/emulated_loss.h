// SPDX-License-Identifier: Apache-2.0
/// The loss of logits that are cut along the vocabulary, written out.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string_view>

#include "subjects/parallel/vocabulary_numerics.h"

namespace isoshard {

/// How a rank adds over its tp group: what the place is called, its own tensor, and the
/// declared point.
using ReduceOverTp = std::function<at::Tensor(std::string_view what, const at::Tensor& own,
                                              const ReductionPoint& point)>;

struct SplitLoss {
  at::Tensor sample_sum_B;         ///< fp64
  at::Tensor logits_gradient_BSV;  ///< in the logits' dtype
};

/// Shapes   logits [B,S,columns of this rank, padding included], targets int64 [B,S] with -100 for
///          what is not counted, weight fp64 [B].
/// Ranks    collective over the tp group, by `reduce`.
/// Errors   ShapeError if the rank has more entries than the logits have columns.
/// Source   SplitVocabulary's formulas. Shares no code with src/subjects/model/loss: that is what
///          is held to it.
[[nodiscard]] SplitLoss emulated_split_loss(const SplitVocabulary& vocabulary, int tp_rank,
                                            double label_smoothing, const at::Tensor& logits_BSV,
                                            const at::Tensor& targets_BS,
                                            const at::Tensor& weight_B, const ReduceOverTp& reduce);

/// The same of the linear loss: minus the target's logit, which is added over tp at `target_logit`,
/// in fp64.
[[nodiscard]] SplitLoss emulated_split_linear_loss(const SplitVocabulary& vocabulary, int tp_rank,
                                                   const at::Tensor& logits_BSV,
                                                   const at::Tensor& targets_BS,
                                                   const at::Tensor& weight_B,
                                                   const ReduceOverTp& reduce);

}  // namespace isoshard
